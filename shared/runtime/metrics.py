"""Metrics that every service has, and two kinds that prometheus_client lacks: metrics of the
planes, and metrics that have no value yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.transport.base import ERROR_KINDS, Counters, Transport
from shared.version import VERSION

Plane = Literal["node", "swarm"]
BUCKET_RATIO = 1.2
"""Ratio of a bucket's bounds. A quantile is interpolated within a bucket, so with this ratio it is
never wrong by more than a fifth, whatever the distribution.
"""


def buckets_from(first: float, last: float, *, whole: bool = False) -> tuple[float, ...]:
    """Bounds from `first` to `last` or a little beyond, each at most `BUCKET_RATIO` times the
    previous one. Values below `first` all fall into one bucket. `whole`: bounds for counts, where
    neighbours may be one apart.
    """
    bounds = [first]
    while bounds[-1] < last:
        following = bounds[-1] * BUCKET_RATIO
        # Rounded down, so that the ratio is not exceeded; to three digits, so that a scrape is
        # readable.
        digits = 2 - math.floor(math.log10(following))
        rounded = math.floor(following * 10**digits) / 10**digits
        bounds.append(max(float(math.floor(rounded)), bounds[-1] + 1) if whole else rounded)
    return tuple(bounds)


LONGEST_S = 3600.0
DURATION_BUCKETS_S = buckets_from(0.01, LONGEST_S)
"""10 ms to an hour: more than every timeout (an engine call's: half an hour).
"""
ACK_BUCKETS_S = buckets_from(0.002, 120.0)
"""For operations that take milliseconds normally, and the time of a few retries otherwise."""
PAYLOAD_BUCKETS_BYTES = buckets_from(1024.0, 2.0**28)
"""1 KiB to 256 MiB."""


def service_registry(ready: Callable[[], bool], run: str = "", stop_requested: Callable[[], float] = float) -> CollectorRegistry:
    """A registry with the metrics that every service exports. `ready` is called at each scrape;
    `run` is the name of the run (`node.run`), empty for a process that belongs to no run.
    `stop_requested`: Unix time at which the process was asked to stop, 0 before.
    """
    # Without the `_created` series of every counter and histogram: `process_start_time_seconds`
    # says the same once.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    Gauge("swarm_build_info", "Version of the software, as a label; the value is always 1.", ["version"], registry=registry).labels(
        VERSION
    ).set(1)
    text = "Name of the run (node.run), as a label; the value is always 1. Rules compare values only within a run."
    if run:
        Gauge("swarm_run_info", text, ["run"], registry=registry).labels(run).set(1)
    Gauge(
        "swarm_ready", "1 while the service is set up and connected to NATS, else 0, as /readyz says.", registry=registry
    ).set_function(ready)
    Gauge(
        "swarm_stop_requested_timestamp_seconds",
        "Unix time at which the process was asked to stop (SIGTERM, SIGINT), 0 before. It waits for one more scrape, so that "
        "alerts can tell a stop on purpose from a failure.",
        registry=registry,
    ).set_function(stop_requested)
    return registry


class LateGauge(Collector):
    """A gauge that is absent until it is first set, because 0 would be wrong."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._value: float | None = None
        registry.register(self)

    def set(self, value: float | None) -> None:
        """Set the value; None removes it."""
        self._value = value

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._documentation, value=self._value)


class PlaneMetrics(Collector):
    """The counters of the connections to the planes. A plane that was never connected is exported
    as down, with counters at 0.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._planes: dict[Plane, Callable[[], Transport | None]] = {}
        self.streams_lost: Callable[[], int] = int
        if registry is not None:
            registry.register(self)

    def watch(self, plane: Plane, transport: Callable[[], Transport | None]) -> None:
        """Export `plane` from now on. `transport` is called at each scrape and returns None as long
        as there is no connection.
        """
        self._planes[plane] = transport

    def describe(self) -> Iterable[Metric]:
        return self._families()

    def collect(self) -> Iterator[Metric]:
        connected, reconnects, errors, certificate, lost, stores, store_seconds = families = self._families()
        lost.add_metric(["node"], self.streams_lost())
        for plane, current in self._planes.items():
            transport = current()
            counters = transport.counters if transport is not None else Counters()
            connected.add_metric([plane], float(transport is not None and transport.connected))
            reconnects.add_metric([plane], counters.reconnects)
            stores.add_metric([plane], counters.stores.count)
            store_seconds.add_metric([plane], counters.stores.seconds)
            expires_at = transport.certificate_expires_at if transport is not None else None
            if expires_at is not None:
                certificate.add_metric([plane], expires_at)
            for kind in ERROR_KINDS:
                errors.add_metric([plane, kind], counters.errors[kind])
        yield from families

    @staticmethod
    def _families() -> tuple[
        GaugeMetricFamily,
        CounterMetricFamily,
        CounterMetricFamily,
        GaugeMetricFamily,
        GaugeMetricFamily,
        CounterMetricFamily,
        CounterMetricFamily,
    ]:
        """Create the families anew for each scrape, because a family keeps every sample added to
        it.
        """
        return (
            GaugeMetricFamily(
                "swarm_nats_connected",
                "1 while connected to the plane's NATS server, else 0; only the verifier is on the swarm plane.",
                labels=["plane"],
            ),
            CounterMetricFamily("swarm_nats_reconnects", "Times the connection to the plane was restored.", labels=["plane"]),
            CounterMetricFamily("swarm_nats_errors", "Errors on the connection to the plane, by kind.", labels=["plane", "kind"]),
            GaugeMetricFamily(
                "swarm_certificate_expiry_timestamp_seconds",
                "Unix time at which the certificate of the plane's server expires, as presented when the connection was made. "
                "Absent without TLS.",
                labels=["plane"],
            ),
            GaugeMetricFamily(
                "swarm_nats_streams_lost",
                "Streams of the node that this process has used and that the plane's server no longer has.",
                labels=["plane"],
            ),
            CounterMetricFamily(
                "swarm_nats_stores", "Messages and keys that the plane's server stored for this process.", labels=["plane"]
            ),
            CounterMetricFamily(
                "swarm_nats_store_seconds",
                "Time for which this process waited until they were stored; the server syncs its disk before it answers.",
                labels=["plane"],
            ),
        )


class PublishMetrics:
    """Attempts to store rollout groups on one plane."""

    def __init__(self, registry: CollectorRegistry, plane: Plane, results: Sequence[str], results_text: str) -> None:
        self._plane = plane
        text = f"Attempts to store a group in the plane's stream, by result: {results_text}."
        self._attempts = Counter("swarm_rollout_publish_total", text, ["plane", "result"], registry=registry)
        for result in results:
            self._attempts.labels(plane, result)
        self._seconds = Histogram(
            "swarm_rollout_publish_duration_seconds",
            "Time from publishing a group until its acknowledgement, including retries within the call.",
            ["plane"],
            buckets=ACK_BUCKETS_S,
            registry=registry,
        ).labels(plane)
        self._size_bytes = Histogram(
            "swarm_rollout_payload_bytes",
            "Encoded size of the groups stored.",
            ["plane"],
            buckets=PAYLOAD_BUCKETS_BYTES,
            registry=registry,
        ).labels(plane)

    def stored(self, seconds: float, size_bytes: int) -> None:
        self._attempts.labels(self._plane, "ok").inc()
        self._seconds.observe(seconds)
        self._size_bytes.observe(size_bytes)

    def failed(self, result: str) -> None:
        self._attempts.labels(self._plane, result).inc()


class DefaultRegistryMetrics(Collector):
    """Exports the metrics in prometheus_client's default registry whose names begin with `prefix`,
    for a library that can use no other registry.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._prefix = prefix
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing, because the families are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        for family in REGISTRY.collect():
            if family.name.startswith(self._prefix):
                yield family

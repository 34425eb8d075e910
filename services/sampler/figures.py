"""The sampler's Prometheus metrics and status figures."""

from __future__ import annotations

import collections

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.sampler.assembly import BatchPlan, WaitFor
from services.sampler.memory import DropReason, SamplerMemory
from services.sampler.share_controller import Shares
from shared.contracts.status_figures import StatusFigure
from shared.contracts.wire import Origin
from shared.runtime.metrics import ACK_BUCKETS_S, LateGauge, buckets_from
from shared.runtime.status import StatusBoard

_LAG_STEPS = (0.0, *buckets_from(1.0, 1024.0, whole=True))
_AGE_S = buckets_from(1.0, 24 * 3600.0)
_ORIGINS: tuple[Origin, ...] = ("local", "external")
_DROPS: dict[Origin, tuple[DropReason, ...]] = {
    "local": ("failed", "stale", "duplicate", "overflow", "lost", "too_large", "unreadable"),
    "external": ("failed", "without_advantage", "aged", "duplicate", "overflow", "lost", "too_large"),
}
"""The drop reasons of each origin. Groups that cannot be decoded, or that left the stream unread,
count as local.
"""


class Figures:
    """Counts events as they happen; `refresh` exports the memory's state."""

    def __init__(self, registry: CollectorRegistry, status: StatusBoard, configured_external: int) -> None:
        self._status = status
        Gauge(
            "swarm_sampler_external_configured",
            "Largest number of foreign groups in a batch (sampler.external); with sampler.adapt the next batch may want fewer.",
            registry=registry,
        ).set(configured_external)
        self._batches = Counter("swarm_sampler_batches_total", "Batches built and stored by this process.", registry=registry)
        self._short = Counter(
            "swarm_sampler_short_batches_total", "Batches built with fewer foreign groups than wanted.", registry=registry
        )
        self._sources = Counter(
            "swarm_sample_source_total",
            "Groups put into batches, by source; replayed ones are not counted.",
            ["source"],
            registry=registry,
        )
        self._replayed = Counter(
            "swarm_sampler_replayed_groups_total",
            "Local groups put into another batch (sampler.replay); no other counter of the sampler includes them.",
            registry=registry,
        )
        self._dropped = Counter(
            "swarm_sampler_dropped_groups_total",
            "Groups dropped without being used in a batch, by origin and reason.",
            ["origin", "reason"],
            registry=registry,
        )
        self._pool = Gauge("swarm_sampler_pool_groups", "Groups in the pool, by origin.", ["origin"], registry=registry)
        self._replayable = Gauge(
            "swarm_sampler_replayable_groups",
            "Local groups of earlier batches that the next batch may replay.",
            registry=registry,
        )
        self._wanted = Gauge(
            "swarm_sampler_groups_wanted",
            "Groups wanted for the next batch: I (local) and J (external).",
            ["origin"],
            registry=registry,
        )
        self._waiting = Counter(
            "swarm_sampler_waiting_seconds_total",
            "Time during which no batch could be built, by what was missing; trainer: the next step of this node's trainer.",
            ["reason"],
            registry=registry,
        )
        self._lag = Histogram(
            "swarm_sample_policy_lag",
            "Staleness of local groups in batches: policy versions between the one that sampled a group and the one trained on it.",
            buckets=_LAG_STEPS,
            registry=registry,
        )
        self._age = Histogram(
            "swarm_sample_age_seconds",
            "Age of each group when it is put into a batch, by origin.",
            ["origin"],
            buckets=_AGE_S,
            registry=registry,
        )
        self._build = Histogram(
            "swarm_sampler_build_duration_seconds",
            "Time from the decision to build a batch until it is stored.",
            buckets=ACK_BUCKETS_S,
            registry=registry,
        )
        self._largest_share = LateGauge(
            "swarm_sampler_groups_per_node_max",
            "Largest number of foreign groups that any one node gave to the last batch. Absent until the first batch.",
            registry=registry,
        )
        for origin in _ORIGINS:
            for family in (self._sources, self._pool, self._age, self._wanted):
                family.labels(origin)
            for reason in _DROPS[origin]:
                self._dropped.labels(origin, reason)
        for waiting in WaitFor:
            if waiting is not WaitFor.NOTHING:
                self._waiting.labels(waiting.name.lower())

    def built(self, plan: BatchPlan, seconds: float, now_s: float) -> None:
        """Record that a batch is in the log; `now_s` is Unix time."""
        self._status.worked()
        self._batches.inc()
        self._short.inc(plan.shortage != "none")
        for origin, entries in (("local", plan.local), ("external", plan.external)):
            self._sources.labels(origin).inc(len(entries))
            for entry in entries:
                self._age.labels(origin).observe(entry.age_s(now_s))
        for entry in plan.local:
            self._lag.observe(entry.staleness(plan.number))
        self._replayed.inc(len(plan.replayed))
        self._largest_share.set(max(collections.Counter(entry.node for entry in plan.external).values(), default=0))
        self._build.observe(seconds)

    def moved(self, shares: Shares) -> None:
        """Set the composition of the next batch."""
        self._wanted.labels("local").set(shares.local)
        self._wanted.labels("external").set(shares.external)
        self._status.set(StatusFigure.WANTED_LOCAL, shares.local)
        self._status.set(StatusFigure.WANTED_EXTERNAL, shares.external)

    def waited(self, reason: WaitFor, seconds: float) -> None:
        """Add time in which the next batch was waiting for `reason`."""
        self._waiting.labels(reason.name.lower()).inc(seconds)

    def refresh(self, memory: SamplerMemory, waiting_for: WaitFor) -> None:
        """Export the current memory; counts and clears its drops."""
        for (origin, reason), count in memory.drops.items():
            self._dropped.labels(origin, reason).inc(count)
            if origin == "external":
                self._status.add(StatusFigure.DROPPED_EXTERNAL, count)
        memory.drops.clear()
        self._pool.labels("local").set(len(memory.local))
        self._pool.labels("external").set(len(memory.external))
        self._replayable.set(len(memory.replayable))
        self._status.set(StatusFigure.BATCHES, memory.next_number - 1)
        self._status.set(StatusFigure.POOL_LOCAL, len(memory.local))
        self._status.set(StatusFigure.POOL_EXTERNAL, len(memory.external))
        self._status.set(StatusFigure.DROPPED_LOCAL, memory.dropped_local)
        self._status.set(StatusFigure.WAITING_FOR, waiting_for)

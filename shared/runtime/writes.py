"""Writes of a process, which report failures.

A write that failed is tried again after a wait that doubles each time, up to `LONGEST_WAIT_S`. It
is logged once for each cause, and counted; the process's status says since when it fails. While the
server cannot be reached a try costs little and its return should be noticed at once, so that is
tried as often as the caller likes.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from shared import atomic_files
from shared.contracts.status_figures import FigureFamily
from shared.roles import Role
from shared.runtime.logs import Log
from shared.runtime.status import StatusBoard
from shared.transport.base import NotConnected

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
KINDS: dict[Role, tuple[str, ...]] = {
    "generator": ("evaluation", "samples", "file_names"),
    "verifier": ("accepted", "names", "refusals"),
    "sampler": (),
    "trainer": ("metrics", "trained", "policy", "position", "checkpoint", "batch_log", "findings", "pruning", "refusal"),
}
"""What each role writes; the names are labels of its metrics."""

_FULL = (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk on which space must be freed."""


@dataclass(slots=True)
class _Failing:
    since: float
    cause: str
    failures: int = 0
    next_try: float = 0.0


class Writes:
    """The writes of one process. Without a registry and a status board it only logs."""

    def __init__(
        self,
        role: Role,
        registry: CollectorRegistry | None = None,
        status: StatusBoard | None = None,
        log: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status, self._log, self._clock = status, log or structlog.get_logger(role), clock
        self._failing: dict[str, _Failing] = {}
        self._failures: Counter | None = None
        self._state: Gauge | None = None
        if registry is not None and KINDS[role]:
            text = "Failed writes, by kind; each is tried again."
            self._failures = Counter(f"swarm_{role}_write_failures_total", text, ["kind"], registry=registry)
            text = "1 while the last write of this kind failed, else 0."
            self._state = Gauge(f"swarm_{role}_write_failing", text, ["kind"], registry=registry)
            for kind in KINDS[role]:
                self._failures.labels(kind)
                self._state.labels(kind)

    def due(self, kind: str) -> bool:
        """Decide whether to write: nothing failed, or the wait after the last failure is over."""
        failing = self._failing.get(kind)
        return failing is None or self._clock() >= failing.next_try

    def failing(self, kind: str) -> bool:
        """Check whether the last write of this kind failed."""
        return kind in self._failing

    @contextmanager
    def trying(self, kind: str, remedy: str, *errors: type[Exception]) -> Iterator[None]:
        """A block that writes. Its `errors`, by default OSError, end it and are told; the caller
        goes on. `remedy`: what happens now and what to do, in a few words; where it says to free
        space and the disk is not full, it says to make it writable.
        """
        caught = errors or (OSError,)
        try:
            yield
        except caught as error:
            self.failed(kind, remedy, error)
        else:
            self.succeeded(kind)

    def failed(self, kind: str, remedy: str, error: Exception) -> None:
        """Count a failed write, log it if its cause is new, and wait longer before the next."""
        now, cause = self._clock(), _cause(error)
        failing = self._failing.setdefault(kind, _Failing(now, ""))
        failing.failures += 1
        away = isinstance(error, NotConnected)
        wait_s = 0.0 if away else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(failing.failures - 1, 16))
        failing.next_try = now + wait_s
        if self._failures is not None and self._state is not None:
            self._failures.labels(kind).inc()
            self._state.labels(kind).set(1)
        if self._status is not None:
            self._status.add(FigureFamily.WRITE_FAILURES.of(kind))
            self._status.set(FigureFamily.FAILING_SINCE.of(kind), time.time() - (now - failing.since))
        if cause != failing.cause:
            failing.cause = cause
            if isinstance(error, OSError) and error.errno not in _FULL:
                remedy = remedy.replace("free space", "make it possible to write")
            self._log.error("write_failed", kind=kind, reason=str(error), failures=failing.failures, remedy=remedy)

    def succeeded(self, kind: str) -> None:
        """Record a write; the first one after failures is logged."""
        failing = self._failing.pop(kind, None)
        if failing is None:
            return
        if self._state is not None:
            self._state.labels(kind).set(0)
        if self._status is not None:
            self._status.set(FigureFamily.FAILING_SINCE.of(kind), None)
        seconds = round(self._clock() - failing.since, 1)
        self._log.info("write_succeeded", kind=kind, failures=failing.failures, failing_s=seconds)


def _cause(error: Exception) -> str:
    """Key that tells causes apart: not the names of drafts and numbers of steps in a message."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"errno {error.errno}"
    return f"{type(error).__name__} {re.sub('[0-9]+', '', str(error))}"


class SyncMetrics(Collector):
    """Exports how long this process waits for its disk, from now on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._before = atomic_files.SYNCS.count, atomic_files.SYNCS.seconds
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return self._families()

    def collect(self) -> Iterator[Metric]:
        syncs, seconds = self._families()
        syncs.add_metric([], atomic_files.SYNCS.count - self._before[0])
        seconds.add_metric([], atomic_files.SYNCS.seconds - self._before[1])
        yield from (syncs, seconds)

    @staticmethod
    def _families() -> tuple[CounterMetricFamily, CounterMetricFamily]:
        return (
            CounterMetricFamily("swarm_disk_syncs", "Files and folders that this process synced to disk.", labels=[]),
            CounterMetricFamily("swarm_disk_sync_seconds", "Time for which this process waited for these syncs.", labels=[]),
        )

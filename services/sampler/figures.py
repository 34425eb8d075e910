"""What the sampler reports: Prometheus metrics and the figures on its status board."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.sampler.assembly import BatchPlan, WaitFor
from services.sampler.memory import SamplerMemory
from shared.runtime import ServiceContext

_STALENESS_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_BUILD_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Figures:
    """Counts as things happen; `refresh` shows the memory's state."""

    def __init__(self, context: ServiceContext) -> None:
        registry: CollectorRegistry = context.registry
        self._status = context.status
        self._batches = Counter("swarm_sampler_batches_total", "Batches appended by this process.", registry=registry)
        self._groups = Counter("swarm_sampler_groups_total", "Groups that went into batches.", ["origin"], registry=registry)
        self._short = Counter("swarm_sampler_short_batches_total", "Batches with fewer than J external groups.", registry=registry)
        self._dropped = Counter(
            "swarm_sampler_dropped_groups_total", "Groups that no batch will take.", ["origin", "reason"], registry=registry
        )
        self._pool = Gauge("swarm_sampler_pool_groups", "Groups in the pool.", ["origin"], registry=registry)
        self._waiting = Counter("swarm_sampler_waiting_seconds_total", "Time without a batch to build.", ["for"], registry=registry)
        self._staleness = Histogram(
            "swarm_sampler_staleness_steps", "Staleness of local groups when used.", buckets=_STALENESS_STEPS, registry=registry
        )
        self._build = Histogram(
            "swarm_sampler_build_seconds", "From the decision to the acknowledged batch.", buckets=_BUILD_SECONDS, registry=registry
        )

    def built(self, plan: BatchPlan, seconds: float) -> None:
        """A batch is in the log."""
        self._batches.inc()
        self._groups.labels("local").inc(len(plan.local))
        self._groups.labels("external").inc(len(plan.external))
        self._short.inc(plan.shortage != "none")
        for entry in plan.local:
            self._staleness.observe(entry.staleness(plan.number))
        self._build.observe(seconds)

    def waited(self, reason: WaitFor, seconds: float) -> None:
        """Time went by in which the next batch was waiting for `reason`."""
        self._waiting.labels(reason.name.lower()).inc(seconds)

    def refresh(self, memory: SamplerMemory, waiting_for: WaitFor) -> None:
        """Show the memory as it is now; counts its drops and clears them."""
        for (origin, reason), count in memory.drops.items():
            self._dropped.labels(origin, reason).inc(count)
            if origin == "external":
                self._status.add("dropped_external", count)
        memory.drops.clear()
        self._pool.labels("local").set(len(memory.local))
        self._pool.labels("external").set(len(memory.external))
        self._status.set("batches", memory.next_number - 1)
        self._status.set("pool_local", len(memory.local))
        self._status.set("pool_external", len(memory.external))
        self._status.set("dropped_local", memory.dropped_local)
        self._status.set("waiting_for", waiting_for)

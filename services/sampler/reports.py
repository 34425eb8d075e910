"""The sampler's reports: metrics and status figures; to the generator, which groups were consumed;
to the log, why no batch is built, how I and J moved, and what cannot be replayed.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.sampler.assembly import BatchPlan, Wait, WaitFor
from services.sampler.composition import Composition
from services.sampler.memory import DropReason, SamplerMemory
from services.sampler.pool import PoolEntry
from shared.contracts.codec import decode, encode
from shared.contracts.control import ForeignDemand, PolicyPointer, SamplerPosition, ServiceStatus
from shared.contracts.messages import rollout_id_of
from shared.contracts.sampler_state import SharingState
from shared.contracts.status_figures import LOADING_POLICY, STOPPED, StatusFigure, is_alive, late_after_s
from shared.contracts.subjects import DEMAND_KEY, POLICY_KEY, SAMPLER_KEY, STATUS_PREFIX, node_bucket
from shared.contracts.wire import MessageError, Origin
from shared.roles import Role
from shared.runtime.logs import Log
from shared.runtime.metrics import ACK_BUCKETS_S, buckets_from
from shared.runtime.status import StatusBoard
from shared.transport.base import Transport

# The sampler's Prometheus metrics and status figures.

_LAG_STEPS = (0.0, *buckets_from(1.0, 1024.0, whole=True))
_AGE_S = buckets_from(1.0, 24 * 3600.0)
_ORIGINS: tuple[Origin, ...] = ("local", "external")
_DROPS: dict[Origin, tuple[DropReason, ...]] = {
    "local": ("failed", "stale", "duplicate", "overflow", "lost", "too_large", "unreadable", "other_scorer"),
    "external": ("failed", "without_advantage", "aged", "mastered", "duplicate", "overflow", "lost", "too_large", "other_scorer"),
}
"""The drop reasons of each origin. Groups that cannot be decoded, or that left the stream unread,
count as local.
"""


class Figures:
    """Counts events as they happen; `refresh` exports the memory's state."""

    def __init__(self, registry: CollectorRegistry, status: StatusBoard) -> None:
        self._status = status
        self._wanted = Gauge(
            "swarm_sampler_wanted_groups",
            "Foreign groups that the next two batches lack; this node's verifiers read that many messages and a margin.",
            registry=registry,
        )
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
        self._sources.labels("demonstration")
        for origin in _ORIGINS:
            for family in (self._sources, self._pool, self._age):
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
        self._sources.labels("demonstration").inc(len(plan.demonstrations))
        self._replayed.inc(len(plan.replayed))
        self._build.observe(seconds)

    def moved(self, shares: Composition) -> None:
        self._status.set(StatusFigure.WANTED_LOCAL, shares.local)
        self._status.set(StatusFigure.WANTED_EXTERNAL, shares.external)

    def wanted(self, groups: int) -> None:
        self._wanted.set(groups)

    def waited(self, reason: WaitFor, seconds: float) -> None:
        self._waiting.labels(reason.name.lower()).inc(seconds)

    def refresh(self, memory: SamplerMemory) -> None:
        """Export the current memory; counts and clears its drops."""
        for (origin, reason), count in memory.drops.items():
            self._dropped.labels(origin, reason).inc(count)
        memory.drops.clear()
        self._pool.labels("local").set(len(memory.local))
        self._pool.labels("external").set(len(memory.external))
        self._status.set(StatusFigure.BATCHES, memory.next_number - 1)
        self._status.set(StatusFigure.POOL_LOCAL, len(memory.local))
        self._status.set(StatusFigure.POOL_EXTERNAL, len(memory.external))
        self._status.set(StatusFigure.DROPPED_LOCAL, memory.dropped_local)


_PROCESSES: dict[WaitFor, tuple[Role, ...]] = {WaitFor.LOCAL: ("generator", "verifier"), WaitFor.TRAINER: ("trainer",)}
"""Whose work a wait is for. Foreign groups come from other nodes."""
_FOREIGN_REMEDY = "sampler.shortage decides what happens without foreign groups; short or fill_local go on"
_STATUSES_READ = 64

TOLD_EVERY_S = 60.0
DEMAND_TOLD_EVERY_S = 0.5
FIRST_BATCH_S = 600.0
"""As long as `swarm status` takes a node without a first step for one that is starting."""
_WAITS_KEPT, _WAITS_NEEDED = 9, 3
"""Of so many waits the median is taken, so that one outage does not count as usual."""


def log_unreadable(log: Log, problems: Sequence[str]) -> None:
    """Log scored groups that cannot be decoded and are left out."""
    for problem in problems:
        log.error("scored_group_unreadable", reason=problem, consequence="dropped")


def log_gone(log: Log, replayable: Sequence[PoolEntry]) -> None:
    """Log groups that were chosen for replay but are no longer in the stream."""
    for entry in replayable:
        log.info(
            "replayable_group_gone",
            rollout_id=rollout_id_of(entry.group_id),
            stream_seq=entry.seq,
            consequence="it is not replayed; it has been trained on before",
        )


@dataclass(frozen=True, slots=True)
class NodeProcesses:
    """The processes of a node by their statuses, at the Unix time `at`, and its newest policy."""

    statuses: Sequence[ServiceStatus]
    policy: PolicyPointer | None
    at: float

    @classmethod
    async def read(cls, transport: Transport, node: str) -> NodeProcesses:
        """Read them from the node's bucket. Raises TransportError."""
        bucket, statuses = node_bucket(node), list[ServiceStatus]()
        entries, _ = await transport.kv.newest(bucket, _STATUSES_READ, STATUS_PREFIX)
        pointer, policy = await transport.kv.get(bucket, POLICY_KEY), None
        for entry in entries:
            with suppress(MessageError):  # of another version
                statuses.append(decode(entry.value, ServiceStatus))
        with suppress(MessageError):
            policy = decode(pointer.value, PolicyPointer) if pointer is not None else None
        return cls(statuses, policy, time.time())

    def doings(self, roles: Sequence[Role]) -> str:
        """The states of these roles' processes, such as `generator: generating; verifier:
        verifying`.
        """
        loads = self._loads()
        states = {role: alive[0].state for role in roles if (alive := self._alive(role))}
        if loads and "generator" in states:
            states["generator"] = loads
        return "; ".join(f"{role}: {state}" for role, state in states.items())

    def fault(self, roles: Sequence[Role]) -> str:
        """The first of these roles that does not answer, or that answers and is late with its work,
        in words; empty if there is none.
        """
        needed = max(self.statuses, key=lambda status: status.updated_at).roles if self.statuses else []
        for role in (each for each in roles if each in (needed or roles)):
            alive = self._alive(role)
            if not alive:
                known = [status for status in self.statuses if status.role == role]
                seen = max(known, key=lambda status: status.updated_at, default=None)
                if seen is None:
                    return f"no word from the {role}"
                said = f"the {role} ended" if seen.state == STOPPED else f"the {role} last answered"
                return f"{said} {self.at - seen.updated_at:.0f} s ago"
            late_s = [self._late_s(status) for status in alive]
            if all(late_s):  # of several replicas, one that works is enough
                return f"the {role} answers ({alive[0].state}) but its last work was {min(late_s):.0f} s ago"
        return ""

    def _alive(self, role: Role) -> list[ServiceStatus]:
        """The newest first."""
        alive = (status for status in self.statuses if status.role == role and is_alive(status, self.at))
        return sorted(alive, key=lambda status: -status.updated_at)

    def _late_s(self, status: ServiceStatus) -> float:
        """Seconds since the process's last work if that is longer than its pace explains, else 0.
        Before its first work a process is not late, however slow the machine. A verifier is late
        only with what the generator has made since, and a generator that loads a policy has
        `FIRST_BATCH_S` for that.
        """
        worked_at = status.figures.get(StatusFigure.WORKED_AT)
        if worked_at is None:
            return 0.0
        until = self.at
        if status.role == "verifier":
            until = max((each.figures.get(StatusFigure.WORKED_AT, 0.0) for each in self._alive("generator")), default=self.at)
        patience_s = late_after_s(status.figures.get(StatusFigure.WORK_EVERY_S)) or FIRST_BATCH_S
        if status.role == "generator" and self._loads():
            patience_s = max(patience_s, FIRST_BATCH_S)
        return self.at - worked_at if until - worked_at > patience_s else 0.0

    def _loads(self) -> str:
        """The published policy that no generator samples from yet, in words; empty if none."""
        alive, policy = self._alive("generator"), self.policy
        used = max((status.figures.get(StatusFigure.POLICY_VERSION, 0.0) for status in alive), default=0.0)
        if policy is None or not alive or used >= policy.version:
            return ""
        tried = alive[0].state.partition(", ")[2] if alive[0].state.startswith(LOADING_POLICY) else ""
        since_s = max(0.0, self.at - policy.created_at)
        return f"{LOADING_POLICY} {policy.version}, published {since_s:.0f} s ago{f', {tried}' if tried else ''}"


class WaitingReport:
    """Logs every `TOLD_EVERY_S` that no batch is built, with what is missing and who is at work on
    it.

    That is a warning only if a process whose work is awaited does not answer or is late with it
    (`NodeProcesses.fault`), or if foreign groups are awaited for longer than twice the median of
    the last waits. Until this process's first batch it is one only after `FIRST_BATCH_S`. `now`:
    seconds of a clock that only goes forward.
    """

    def __init__(self, log: Log, processes: Callable[[], Awaitable[NodeProcesses]]) -> None:
        self._log, self._processes = log, processes
        self._any_built = False
        self._waits_s: deque[float] = deque(maxlen=_WAITS_KEPT)
        self._since: float | None = None
        self._told_at = 0.0

    def begin(self, now: float) -> None:
        """From now on the next batch is waited for. Called again whenever the logs were read again,
        which does not make the start longer.
        """
        self._told_at = now
        if self._any_built or self._since is None:
            self._since = now

    def built(self, now: float) -> None:
        if self._any_built and self._since is not None:
            self._waits_s.append(now - self._since)
        self._any_built = True
        self.begin(now)

    async def waits(self, waiting: Wait, next_batch: int, now: float) -> None:
        """The next batch cannot be built now. Logs that if it is time to. Raises TransportError."""
        if now - self._told_at <= TOLD_EVERY_S:
            return
        self._told_at, waited_s = now, now - (self._since or 0.0)
        roles, because, problem = _PROCESSES.get(waiting.reason, ()), "", {"remedy": _FOREIGN_REMEDY}
        usual_s = statistics.median(self._waits_s) if len(self._waits_s) >= _WAITS_NEEDED else 0.0
        if roles:
            processes = await self._processes()
            fault = processes.fault(roles)
            because = "" if fault else processes.doings(roles)
            problem = {"found": fault, "remedy": "its log says why; `swarm status` shows all processes"}
        elif waited_s < 2 * usual_s:
            because = f"batches take about {usual_s:.0f} s"
        if not self._any_built and waited_s < FIRST_BATCH_S:
            because = because or "before the first batch the base policy is evaluated and the first groups are generated"
        (self._log.info if because else self._log.warning)(
            "no_batch_yet" if because else "no_batch",
            next_batch=next_batch,
            waiting_for=waiting.reason.name.lower(),
            have=waiting.have,
            need=waiting.need,
            seconds=round(waited_s),
            **({"because": because} if because else problem),
        )


def log_move(log: Log, becomes: Composition, state: SharingState) -> None:
    """Log the new I and J; `state` says why they moved."""
    log.info("shares_moved", local=becomes.local, external=becomes.external, why=state.why)


class DemandReport:
    """The number of groups that verifiers are asked to read, in the node's bucket. While something
    is wanted it is written again as the scored stream grows, because what was stored may be of no
    use.
    """

    def __init__(self, transport: Transport, node: str) -> None:
        self._transport, self._node = transport, node
        self._told: ForeignDemand | None = None
        self._told_at = 0.0

    async def tell(self, groups: int, scored_seq: int, now: float) -> None:
        """Write that `groups` are wanted, having read the scored stream up to `scored_seq`; `now`
        as in `WaitingReport`.
        """
        told = self._told
        grown = told is not None and groups and scored_seq != told.scored_seq and now - self._told_at >= DEMAND_TOLD_EVERY_S
        if told is None or groups != told.groups or grown:
            demand = ForeignDemand(groups=groups, scored_seq=scored_seq)
            await self._transport.kv.put(node_bucket(self._node), DEMAND_KEY, encode(demand))
            self._told, self._told_at = demand, now


class ConsumedReport:
    """The report by which the generator paces itself, in the node's bucket; written only when it
    has changed.
    """

    def __init__(self, transport: Transport, node: str) -> None:
        self._transport, self._node = transport, node
        self._told: SamplerPosition | None = None

    async def tell(self, memory: SamplerMemory, local: int | None) -> None:
        """Report which local groups were consumed and which were dropped; the generator may be
        waiting for it.

        local: I of the next batch if it moves, else None.
        """
        position = SamplerPosition(
            batch_number=memory.next_number - 1,
            consumed_local=memory.consumed_local,
            dropped_local=memory.dropped_local,
            local=local,
        )
        if position != self._told:
            await self._transport.kv.put(node_bucket(self._node), SAMPLER_KEY, encode(position))
            self._told = position

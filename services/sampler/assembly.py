"""When to build the next batch, and from what: a pure state machine over pools, trainer position
and time.

A batch waits for three things in turn: for the trainer to be near the end of the log, for I local
groups, and for J foreign ones.

* **Trainer**: at most `prefetch` batches are ahead of it.
* **Local**: always I. They must arrive while the generator lives: admission lets it claim
  (max_staleness + version + 1) * I groups plus the dropped ones. The existing batches were filled
  from what it could claim one version earlier, (max_staleness + version) * I, so I more are on
  their way; each is consumed, or dropped and counted, which frees its place.
* **Foreign**: after the pool has been short of J for `shortage_wait_s`, the shortage policy
  decides. `wait` keeps waiting; `short` continues with the available groups; `fill_local` adds
  available local groups up to the missing number. It does not wait for those: the generator's pace
  depends on I, so they may never come. No policy makes an empty batch.
* **Newcomers**: all senders that have not earned a whole share yet get a part of the foreign groups
  together, or what the established ones leave, so that a young swarm, in which every node is new,
  shares at full speed. A thousand new keys get no more of a batch than one.
* **Replay**: local groups of earlier batches are added to I and J (`replay`). Nothing waits for
  them, and they never make a batch alone.
* **Demonstrations**: groups of the roster's nodes whose answers are all right, where
  `verifier.demonstrations` takes them, are added too (`demonstrations_of`). Nothing waits for them
  either. Each says this node's own pass rate on its source, above which a reward is an advantage.
* **Cap**: one node's groups get at most a share (`draws.node_cap`) as soon as other nodes have been
  heard within `max_external_age_s`. The batch does not wait for groups that only the cap excludes;
  otherwise one node's flood would make the trainer wait for the slowest of the others. It has fewer
  foreign groups, or local ones instead if the policy is `fill_local`.

If I and J move (`composition`), a batch prefers local groups that no later batch may take to
foreign ones, even beyond I: when I has just become smaller, the generator has started groups that
the next batches could not use in time.

The shortage clock runs from the moment the pool became short, across batches and while the trainer
trains. So a node whose swarm has gone silent waits once, not at every step; the clock restarts as
soon as the pool holds J again.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Literal

from services.sampler.composition import Composition, ForeignUse, moves, next_composition
from services.sampler.memory import SamplerMemory, replayed
from services.sampler.pool import Knowledge, PoolEntry
from services.sampler.strategies import strategy_named
from services.sampler.strategies.base import (
    Strategy,
    available,
    candidates,
    drawn,
    in_order,
    local_order,
    node_cap,
    part_of,
    weights_of,
)
from shared.config.sampler_section import SamplerSection
from shared.contracts.codec import encode
from shared.contracts.control import TrainerPosition
from shared.contracts.messages import Batch, BatchItem, Places, ScoredGroup, rollout_id_of
from shared.contracts.sampler_state import SamplerState
from shared.runtime.logs import Log
from shared.seeds import number_from
from shared.transport.base import TooLarge


def newcomers_of(entries: Sequence[PoolEntry]) -> frozenset[str]:
    """The accounts of which no entry was accepted from an established node."""
    return frozenset(entry.node for entry in entries) - {entry.node for entry in entries if entry.established}


def newcomers_most(established: Sequence[PoolEntry], wanted: int, cap: int, part: float) -> int:
    """Return how many of `wanted` may come from newcomers: `part` of them, rounded down but at
    least one, plus what established nodes cannot fill.
    """
    return max(1, part_of(wanted, part), wanted - available(established, wanted, cap))


def draw_with_newcomers(
    strategy: Strategy,
    entries: Sequence[PoolEntry],
    wanted: int,
    cap: int,
    part: float,
    rng: random.Random,
    knowledge: Knowledge,
) -> list[PoolEntry]:
    """Like `drawn`, with as many entries, at most `newcomers_most` of them from newcomers. Raises
    StrategyError as it does.
    """
    chosen = drawn(strategy, entries, wanted, cap, rng, knowledge)
    new = newcomers_of(entries)
    established = [entry for entry in entries if entry.node not in new]
    newcomers = [entry for entry in chosen if entry.node in new]
    most = newcomers_most(established, wanted, cap, part)
    if len(newcomers) <= most:
        return chosen
    return newcomers[:most] + drawn(strategy, established, wanted - most, cap, rng, knowledge)


_NOTHING_KNOWN = Knowledge()

BATCHES_AHEAD = 2
"""Batches whose foreign groups are asked for: one is drawn while the other is read and scored."""
_SOON_OLD = 0.5


class WaitFor(IntEnum):
    """Reason why no batch is built. The value is the status figure `waiting_for`."""

    NOTHING = 0
    LOCAL = 1
    EXTERNAL = 2
    TRAINER = 3


@dataclass(frozen=True, slots=True)
class Wait:
    """No batch now. `have` of `need`: groups for LOCAL and EXTERNAL; for TRAINER, its current batch
    number and the number it must reach.
    """

    reason: WaitFor
    have: int
    need: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The groups of the next batch in training order (local, foreign, demonstrations, replayed),
    and how they were chosen.
    """

    number: int
    local: tuple[PoolEntry, ...]
    external: tuple[PoolEntry, ...]
    aged: tuple[PoolEntry, ...]
    """External entries that have become too old and leave the pool with this batch."""
    mastered: tuple[PoolEntry, ...]
    """Those of sources that this node's policy has mastered, which leave it as well."""
    seed: int
    pool_local: int
    pool_external: int
    shortage: Literal["none", "fill_local", "short"]
    node_cap: int
    """Largest number of foreign groups that one node may have in this batch."""
    strategy: str
    composition: Composition
    """The I and J with which it was built. Local groups added because they would otherwise become
    too stale are included in I.
    """
    weights: Mapping[int, float]
    """By position of the external entries: weight in the draw divided by the pool's mean weight;
    empty for a strategy without weights.
    """
    places: Places | None
    replayed: tuple[PoolEntry, ...] = ()
    """Local groups of earlier batches that this batch repeats; not part of `local`."""
    pool_replay: int = 0
    """Number of groups that those were drawn from."""
    demonstrations: Mapping[PoolEntry, float] = field(default_factory=dict)
    """Demonstrations, with this node's pass rate on their sources; not part of `external`."""


def groups_wanted(
    external: Iterable[PoolEntry],
    composition: Composition,
    settings: SamplerSection,
    now: float,
    knowledge: Knowledge,
) -> int:
    """Return how many foreign groups the next two batches lack, in steps of J, so that not every
    group that arrives changes it. Where J may rise, that is one more, because J rises only where
    groups are left over: even a node whose J is 0 then looks at one group now and then.

    external: entries that the strategy keeps; those that will soon be too old or of a mastered
    source do not count. Where twice as many of mastered sources lie there as are lacking, none is
    wanted until a batch has taken them away: others would most likely be of these sources, too.
    composition: J of the next batch.
    """
    most, spare = composition.external, int(moves(settings) and composition.external < settings.external)
    if not most + spare:
        return 0
    per_batch = math.ceil(most * settings.oversample)
    external = [entry for entry in external if not entry.demonstration]
    young = [entry for entry in external if entry.age_s(now) <= _SOON_OLD * settings.max_external_age_s]
    mastered = sum(knowledge.pass_record(entry.source).mastered for entry in young)
    lacking = BATCHES_AHEAD * per_batch + spare - (len(young) - mastered)
    if lacking <= 0 or mastered >= 2 * lacking:
        return 0
    step = max(1, most)
    return math.ceil(lacking / step) * step


class Assembly:
    """Decides when and from what to build batches. Its only state is the time since when the
    external pool has been short.
    """

    def __init__(self, settings: SamplerSection, *, node: str, seed: int) -> None:
        """node, seed: `node.id` and `node.seed`, on which the draws of a batch depend.

        Raises:
            ValueError: the strategy cannot be loaded (`shared.registry.Registry.load`).
        """
        self.settings = settings
        self._node, self._seed = node, seed
        self._strategy = strategy_named(settings.strategy)
        self._short_since: float | None = None

    def decide(
        self,
        local: Iterable[PoolEntry],
        external: Iterable[PoolEntry],
        number: int,
        position: TrainerPosition | None,
        now: float,
        heard_of: Mapping[str, float] = MappingProxyType({}),
        knowledge: Knowledge = _NOTHING_KNOWN,
        composition: Composition | None = None,
        replayable: Iterable[PoolEntry] = (),
    ) -> Wait | BatchPlan:
        """Wait, or build batch `number`.

        Args:
            local: Entries that are not too stale for this batch.
            external: Entries that the strategy keeps; those older than `max_external_age_s` are not
                used.
            number: Number of the next batch.
            position: The trainer's position; None until it has written one.
            now: Unix time, seconds.
            heard_of: Other nodes and when the newest usable group of each arrived
                (`SamplerMemory.heard_of`).
            knowledge: What the strategy may use besides the entries.
            composition: I and J of this batch; None: as configured.
            replayable: Local entries of earlier batches that this one may repeat
                (`SamplerMemory.replayable`).
        """
        settings = self.settings
        own = sorted(local, key=local_order)
        composition = self._with_last_chances(composition or next_composition(None, settings), own, number)
        everything = list(external)
        young = [entry for entry in everything if entry.age_s(now) <= settings.max_external_age_s]
        fresh = [entry for entry in young if not (entry.demonstration or knowledge.pass_record(entry.source).mastered)]
        nodes = {entry.node for entry in fresh} | {node for node, at in heard_of.items() if now - at <= settings.max_external_age_s}
        cap = node_cap(composition.external, settings.max_share_per_node, len(nodes))
        usable = available(fresh, composition.external, cap)
        waited_s = self._short_for(len(fresh) < composition.external, now)

        trained = position.policy_version if position is not None else 0
        if number > trained + settings.prefetch or (position is not None and position.finished):
            return Wait(WaitFor.TRAINER, trained, number - settings.prefetch)
        if len(own) < composition.local:
            return Wait(WaitFor.LOCAL, len(own), composition.local)
        missing = max(0, composition.external - usable)
        if len(fresh) < composition.external and (settings.shortage == "wait" or waited_s < settings.shortage_wait_s):
            return Wait(WaitFor.EXTERNAL, len(fresh), composition.external)
        filled = own[: composition.local + missing] if settings.shortage == "fill_local" else own[: composition.local]
        if not filled and not fresh:
            return Wait(WaitFor.EXTERNAL, 0, composition.external)

        seed = batch_seed(self._seed, self._node, number)
        chosen, places = self._draw(fresh, composition.external, cap, random.Random(seed), knowledge)
        kept = set(map(id, young))
        again = list(replayable)
        groups = len(filled) + min(len(chosen), composition.external)
        return BatchPlan(
            number=number,
            local=tuple(filled),
            external=tuple(chosen),
            aged=tuple(entry for entry in everything if id(entry) not in kept),
            mastered=tuple(entry for entry in young if knowledge.pass_record(entry.source).mastered),
            seed=seed,
            pool_local=len(own),
            pool_external=len(fresh),
            shortage="none" if not missing else "short" if settings.shortage == "wait" else settings.shortage,
            node_cap=cap,
            strategy=self._strategy.name,
            composition=composition,
            weights=_relative_weights(self._strategy, fresh, chosen, composition.external, knowledge),
            places=places,
            replayed=tuple(replayed(again, settings.replay, seed)),
            pool_replay=len(again),
            demonstrations=demonstrations_of(young, groups, settings.max_share_per_node, seed, knowledge),
        )

    def _with_last_chances(self, composition: Composition, own: Sequence[PoolEntry], number: int) -> Composition:
        """Raise I, and lower J equally, so that local groups that would be too stale for the next
        batch are used now.
        """
        if composition.most_local == composition.local:
            return composition
        last_chance = sum(entry.staleness(number + 1) > self.settings.max_staleness for entry in own)
        local = min(max(composition.local, last_chance), composition.most_local)
        return replace(composition, local=local, external=composition.external - (local - composition.local))

    def _draw(
        self, fresh: Sequence[PoolEntry], wanted: int, cap: int, rng: random.Random, knowledge: Knowledge
    ) -> tuple[list[PoolEntry], Places | None]:
        if not wanted:
            return [], None
        drawn = candidates(len(fresh), wanted, self.settings.oversample)
        # A cap in the same proportion leaves, among the candidates, as many as the trainer may
        # keep.
        wider = cap * drawn // wanted
        chosen = draw_with_newcomers(self._strategy, fresh, drawn, wider, self.settings.newcomer_share, rng, knowledge)
        new = newcomers_of(fresh)
        established = [entry for entry in chosen if entry.node not in new]
        newcomers = sorted({entry.node for entry in chosen} & new)
        most = newcomers_most(established, wanted, cap, self.settings.newcomer_share) if newcomers else None
        sources = len({entry.source for entry in fresh})
        return chosen, Places(
            keep=wanted,
            node_cap=cap,
            newcomers=newcomers,
            newcomers_most=most,
            source_cap=node_cap(wanted, self.settings.max_share_per_source, sources),
        )

    def _short_for(self, short: bool, now: float) -> float:
        if not short:
            self._short_since = None
            return 0.0
        self._short_since = now if self._short_since is None else min(self._short_since, now)
        return now - self._short_since


def _relative_weights(
    strategy: Strategy, fresh: Sequence[PoolEntry], chosen: Sequence[PoolEntry], wanted: int, knowledge: Knowledge
) -> dict[int, float]:
    if strategy.weigh is None or not chosen:
        return {}
    weights = weights_of(strategy.name, strategy.weigh, fresh, wanted, knowledge)
    mean = math.fsum(weights) / len(weights)
    by_seq = {entry.seq: weight / mean for entry, weight in zip(fresh, weights, strict=True)}
    return {entry.seq: by_seq[entry.seq] for entry in chosen}


def demonstrations_of(
    entries: Iterable[PoolEntry], groups: int, max_share: float, seed: int, knowledge: Knowledge
) -> dict[PoolEntry, float]:
    """The demonstrations that join a batch of `groups` others, with this node's pass rate on their
    sources: at most a quarter of the whole, drawn uniformly, and of one node no more than
    `max_share` of them while others have some. A source of which this node knows no pass rate, or
    which it has mastered, has none.
    """
    able: dict[PoolEntry, float] = {}
    for entry in entries:
        record = knowledge.pass_record(entry.source)
        if entry.demonstration and not record.mastered and (rate := record.pass_rate) is not None:
            able[entry] = rate
    most = groups // 3
    cap = node_cap(most, max_share, len({entry.node for entry in able}))
    lots = random.Random(number_from(f"demonstrations {seed}"))
    return {entry: able[entry] for entry in in_order(lots.sample(list(able), len(able)), most, cap)}


def batch_seed(node_seed: int, node_id: str, number: int) -> int:
    """Seed of one batch's draw, below 2**62: different for every node and number, the same in every
    run.
    """
    return number_from(f"swarm-batch\x00{node_seed}\x00{node_id}\x00{number}") >> 2


# Turns a plan into the `Batch` message that fits the log, and into the input of the controller of
# J.
#
# The log's limit on a message is learned from the first batch that the log refuses. From then on
# the largest groups of a plan wait for a later batch, and a group that fits into no batch is
# dropped.

_LONGEST_S = 1e9
"""The limit of `Seconds`; a batch that no reader can decode would stop the node."""


def compose(plan: BatchPlan, payloads: Mapping[int, ScoredGroup], state: SamplerState, now: float) -> Batch:
    """The batch message. `payloads` holds the scored group at each of the plan's positions; `state`
    is the memory after this batch.
    """
    again = {entry.seq for entry in plan.replayed}
    return Batch(
        number=plan.number,
        created_at=now,
        items=[
            BatchItem(
                scored=payloads[entry.seq],
                staleness=entry.staleness(plan.number) if entry.origin == "local" else None,
                age_s=min(entry.age_s(now), _LONGEST_S),
                weight=plan.weights.get(entry.seq) if entry.origin == "external" else None,
                pass_rate=plan.demonstrations.get(entry),
                replayed=entry.seq in again,
            )
            for entry in (*plan.local, *plan.external, *plan.demonstrations, *plan.replayed)
        ],
        strategy=_explained(plan),
        seed=plan.seed,
        wanted_local=plan.composition.local,
        wanted_external=plan.composition.external,
        pool_local=plan.pool_local,
        pool_external=plan.pool_external,
        pool_replay=plan.pool_replay,
        shortage=plan.shortage,
        state=state,
        places=plan.places,
    )


def foreign_use(plan: BatchPlan, now: float) -> ForeignUse:
    """The batch's use of foreign groups, for the controller that moves J."""
    return ForeignUse(
        wanted=plan.composition.external,
        taken=min(len(plan.external), plan.composition.external),
        waited_s=_typical_wait_s(plan.external, now),
        left=plan.pool_external - len(plan.external),
    )


def _typical_wait_s(entries: Sequence[PoolEntry], now: float) -> float:
    """The median over senders of the mean time that their groups have waited here. No sender can
    move it alone or by its claims.
    """
    by_sender: dict[str, list[float]] = {}
    for entry in entries:
        by_sender.setdefault(entry.node, []).append(entry.waited_s(now))
    return statistics.median_low([statistics.fmean(waits) for waits in by_sender.values()]) if by_sender else 0.0


def _explained(plan: BatchPlan) -> str:
    capped = plan.node_cap < plan.composition.external
    return f"{plan.strategy}, at most {plan.node_cap} of a node" if capped else plan.strategy


@dataclass(frozen=True, slots=True)
class Fitted:
    """`plan` without the groups that do not fit. `too_large` lists the new groups that would not
    fit even alone.
    """

    plan: BatchPlan
    left_out: int
    too_large: tuple[PoolEntry, ...]


def fitted(plan: BatchPlan, sizes: Mapping[int, int], room_bytes: int) -> Fitted:
    """The part of a plan that fits into `room_bytes`.

    Replayed groups are left out first, because they were trained on before. Then the largest groups
    wait: demonstrations, other foreign ones, local ones. So nobody can make a node leave out its
    local groups by sending large ones, and as many of the available groups as possible are trained
    on.

    Args:
        plan: As drawn.
        sizes: Encoded size of each of its groups, by position, in bytes.
        room_bytes: Largest total size of a batch's groups.
    """
    entries = (*plan.local, *plan.external, *plan.demonstrations)
    too_large = tuple(entry for entry in entries if sizes[entry.seq] > room_bytes)
    total = sum(sizes[entry.seq] for entry in (*entries, *plan.replayed))
    waiting: set[int] = set()
    for group in (plan.replayed, tuple(plan.demonstrations), plan.external, plan.local):
        for entry in sorted(group, key=lambda entry: (-sizes[entry.seq], entry.seq)):
            if total <= room_bytes:
                break
            waiting.add(entry.seq)
            total -= sizes[entry.seq]
    smaller = replace(
        plan,
        local=tuple(entry for entry in plan.local if entry.seq not in waiting),
        external=tuple(entry for entry in plan.external if entry.seq not in waiting),
        demonstrations={entry: rate for entry, rate in plan.demonstrations.items() if entry.seq not in waiting},
        replayed=tuple(entry for entry in plan.replayed if entry.seq not in waiting),
    )
    return Fitted(smaller, len(waiting), too_large)


class LogRoom:
    """The largest size of a batch's groups that the stream `stream` accepts, in bytes."""

    def __init__(self, stream: str, log: Log) -> None:
        self._stream, self._log = stream, log
        self._bytes: int | None = None
        """None until the log has refused a batch."""

    def fitting(self, plan: BatchPlan, present: dict[int, ScoredGroup], memory: SamplerMemory) -> BatchPlan | None:
        """The part of the plan that the log accepts. None if a group that fits into no batch was
        dropped, so that the batch is planned again.
        """
        if self._bytes is None:
            return plan
        sizes = {seq: len(encode(scored)) for seq, scored in present.items()}
        fits = fitted(plan, sizes, self._bytes)
        for entry in fits.too_large:
            memory.lose(entry.seq, "too_large")
            self._log.error(
                "group_too_large",
                rollout_id=rollout_id_of(entry.group_id),
                node=entry.node,
                size_bytes=sizes[entry.seq],
                room_bytes=self._bytes,
                consequence="dropped",
                remedy=f"lower generator.completions or generator.max_new_tokens; or raise max_msg_size of {self._stream}",
            )
        return None if fits.too_large else fits.plan

    def make_room(self, batch: Batch, error: TooLarge) -> None:
        """Note the log's limit: the limit it reported less the size of everything but groups, or
        half of the refused size.
        """
        size_bytes, groups_bytes = len(encode(batch)), sum(len(encode(item.scored)) for item in batch.items)
        limit_bytes = size_bytes // 2 if error.limit_bytes is None else error.limit_bytes
        self._bytes = max(1, min(limit_bytes - (size_bytes - groups_bytes), groups_bytes - 1))
        self._log.warning(
            "batch_too_large",
            batch=batch.number,
            size_bytes=size_bytes,
            reason=str(error),
            consequence=f"batches are limited to {self._bytes} bytes of groups; the largest groups wait",
            remedy=f"lower sampler.local or sampler.external; or raise max_msg_size of {self._stream} and restart the sampler",
        )

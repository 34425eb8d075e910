"""The sampler's memory, as a pure replay of the scored stream.

Invariant: the memory is a function of the newest batch's `SamplerState`, of the stream up to
`cursor` and of the next batch's number, and of nothing else. A sampler that is killed at any
instant and reads the stream again therefore builds the same batch. For this reason time plays no
part here (expiry by age is decided with each batch), and a full pool drops the entry that arrived
first.

Every local group ends in exactly one of two counts, `consumed_local` or `dropped_local`. The
generator's admission adds them up; a group in neither would block one of its places for ever. A
replayed group was consumed with its first batch and is not counted again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from services.sampler.pool import Pool, PoolEntry, observed, pool_entry, task_source
from shared.config.sampler_section import SamplerSection
from shared.contracts.messages import ScoredGroup
from shared.contracts.sampler_state import MAX_REPLAYABLE, SamplerState, SharingState, TrainedGroups
from shared.contracts.wire import Origin
from shared.seeds import number_from

DUPLICATE_POSITIONS = 4096
"""A group id is recognised if it was seen at most this many positions back. Positions and not
seconds, because a verifier that is down for an hour and then publishes its last group once more
moves the stream by one.
"""

MAX_POSITIONS = 100_000
"""An entry that is this far behind the newest position is dropped, so that the list of settled
positions in a batch stays small.
"""


DropReason = Literal[
    "failed",
    "stale",
    "duplicate",
    "overflow",
    "without_advantage",
    "aged",
    "mastered",
    "lost",
    "too_large",
    "unreadable",
    "other_scorer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Limits of the memory.

    newcomer_share: part of a full external pool that newcomers may take. in_flight_local: most
    local groups that the generator may have in progress, (max_staleness + 1) * I with the largest
    possible I. replay_batches: how many batches ago a local group may first have been trained on to
    be replayed; 0: no replay.
    """

    max_staleness: int
    pool_local: int
    pool_external: int
    newcomer_share: float
    in_flight_local: int
    replay_batches: int = 0


def memory_limits(sampler: SamplerSection) -> MemoryLimits:
    """The settings of the memory. A pool holds at least one batch plus the groups that the
    generator may have in progress, even if a smaller size is configured; otherwise local groups
    would be discarded and generated again for ever.
    """
    most_local = sampler.local + (sampler.external if sampler.adapt == "adaptive" else 0)
    in_flight = (sampler.max_staleness + 1) * most_local
    return MemoryLimits(
        max_staleness=sampler.max_staleness,
        pool_local=max(sampler.pool_local, in_flight, 1),
        pool_external=max(sampler.pool_external, sampler.external, 1),
        newcomer_share=sampler.newcomer_share,
        in_flight_local=in_flight,
        replay_batches=sampler.replay_batches if sampler.replay else 0,
    )


class SamplerMemory:
    """Pools, counts and the position up to which the scored stream was read."""

    def __init__(
        self, limits: MemoryLimits, keeps: Callable[[PoolEntry], bool], state: SamplerState | None = None, next_number: int = 1
    ) -> None:
        """Start from `state` (the newest batch's) with empty pools. Replay the stream from `cursor
        + 1` to fill them.
        """
        self._known = state or SamplerState()
        self._known_settled = frozenset(self._known.settled)
        self._limits = limits
        self._keeps = keeps
        self._seen: OrderedDict[str, int] = OrderedDict()
        self.local = Pool(limits.pool_local)
        self.external = Pool(limits.pool_external, limits.newcomer_share)
        self.replayable = ReplayPool(limits.replay_batches, self._known.replayable, next_number)
        """Local groups of earlier batches that the next batch may replay; none of them is in a
        pool.
        """
        self.next_number = next_number
        self.consumed_local = self._known.consumed_local
        self.dropped_local = self._known.dropped_local
        self.own = self._known.own
        """Statistics of the local scored groups up to `cursor`, including too stale ones and those
        before `scored_seq`.
        """
        self.drops: Counter[tuple[Origin, DropReason]] = Counter()
        """Groups dropped since the counter was last cleared, for logs and metrics."""
        self._heard: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._scorers: dict[str, str] = {}
        """The scorer of each source's newest group."""
        self.cursor = _unneeded_seq(self._known)
        """Position of the last message that was taken in or is not needed."""

    def observe(self, seq: int, scored: ScoredGroup | None) -> None:
        """Take in the message at `seq`, the next one in the stream; None if it cannot be
        decoded.
        """
        self._pass_over(self.cursor + 1, seq - 1)
        self.cursor = seq
        if scored is None:
            if not self._settled_before(seq):
                self._drop("local", "unreadable")  # counted as local: rather one place too many is given back than one too few
            return
        duplicate = self._remember(scored.group_id, seq)
        if scored.origin == "external":
            self._hear(seq, scored)
        usable = scored.failure is None and len(scored.rewards) == len(scored.group.completions)
        if self._settled_before(seq):
            if usable and self.replayable.awaits(seq):
                self.replayable.read_again(pool_entry(seq, scored))
            return
        if duplicate and seq > self._known.scored_seq:
            self.drops[(scored.origin, "duplicate")] += 1
            return
        if not usable:
            self._drop(scored.origin, "failed")
            return
        if scored.origin == "local" and scored.rewards and seq > self._known.scored_seq:
            self.own = observed(self.own, task_source(scored.group.task.ref), scored.rewards, scored.passed)
        entry = pool_entry(seq, scored)
        if entry.scorer and self._scorers.get(entry.source) != entry.scorer:
            self._scorers[entry.source] = entry.scorer
            self.keep_scored_by((entry.scorer,), entry.source)
        self._admit(entry)

    def skip_to(self, first_seq: int) -> None:
        """Positions before `first_seq` no longer exist in the stream; those that are not settled
        are lost.
        """
        self._pass_over(self.cursor + 1, first_seq - 1)
        self.cursor = max(self.cursor, first_seq - 1)

    @property
    def heard_of(self) -> dict[str, float]:
        """Other nodes from which a usable group came within the last `DUPLICATE_POSITIONS`, and
        when the newest arrived (Unix time).

        Limited by positions, because a restarted sampler reads no further back and must then know
        the same nodes.
        """
        return {node: at for node, (seq, at) in self._heard.items() if seq > self.cursor - DUPLICATE_POSITIONS}

    def lose(self, seq: int, reason: DropReason = "lost") -> None:
        """No batch can use this entry: the stream no longer holds its payload, or it is too large
        for the log.
        """
        for pool in (self.local, self.external):
            entry = pool.remove(seq)
            if entry is not None:
                self._drop(entry.origin, reason)
        self.replayable.forget(seq)

    def keep_scored_by(self, scorers: Collection[str], source: str | None = None) -> int:
        """Drop the waiting groups, of one source or of all, that other scorers have scored, since
        one batch cannot compare rewards of two. Returns how many.
        """
        waiting = [entry for pool in (self.local, self.external, self.replayable) for entry in pool]
        others = [each for each in waiting if each.scorer and each.scorer not in scorers and source in (None, each.source)]
        for entry in others:
            self.lose(entry.seq, "other_scorer")
        return len(others)

    def take(
        self,
        chosen: Iterable[PoolEntry],
        aged: Iterable[PoolEntry],
        sharing: SharingState | None = None,
        mastered: Iterable[PoolEntry] = (),
    ) -> SamplerState:
        """Remove a batch's groups, those that have become too old and those of mastered sources.
        Returns the state that is stored in this batch.

        `chosen` excludes replayed groups, for which nothing changes. `sharing` decides the next
        batch.
        """
        entries = list(chosen)
        for entry in entries:
            (self.local if entry.origin == "local" else self.external).remove(entry.seq)
            self.consumed_local += entry.origin == "local"
        self.replayable.trained((entry for entry in entries if entry.origin == "local"), self.next_number)
        dropped: tuple[tuple[DropReason, Iterable[PoolEntry]], ...] = (("aged", aged), ("mastered", mastered))
        for reason, entries_of in dropped:
            for entry in entries_of:
                if self.external.remove(entry.seq) is not None:
                    self._drop("external", reason)
        return self.state(sharing)

    def advance(self) -> None:
        """The batch is in the log: increase the number, and drop the local groups that no later
        batch may use.
        """
        self.next_number += 1
        self.replayable.advance(self.next_number)
        for entry in self.local:
            if entry.staleness(self.next_number) > self._limits.max_staleness:
                self.local.remove(entry.seq)
                self._drop("local", "stale")

    def state(self, sharing: SharingState | None = None) -> SamplerState:
        """The memory as stored in a batch: everything seen and not in a pool is settled."""
        oldest = [seq for pool in (self.local, self.external) if (seq := pool.oldest_seq()) is not None]
        floor_seq = min(oldest) - 1 if oldest else self.cursor
        holds_local, holds_external = self.local.holds_seq, self.external.holds_seq
        settled = [s for s in range(floor_seq + 1, self.cursor + 1) if not (holds_local(s) or holds_external(s))]
        return SamplerState(
            scored_seq=self.cursor,
            floor_seq=floor_seq,
            settled=settled,
            consumed_local=self.consumed_local,
            dropped_local=self.dropped_local,
            own=self.own,
            sharing=sharing,
            replayable=self.replayable.state(self.next_number + 1),
        )

    def purgeable_seq(self, published: SamplerState) -> int:
        """The position up to which the stream may be purged, given the newest published state:
        settled, not replayable, and no longer needed for recognising ids.
        """
        return _unneeded_seq(published)

    def _admit(self, entry: PoolEntry) -> None:
        if entry.origin == "external":
            if not (entry.demonstration or self._keeps(entry)):
                self._drop("external", "without_advantage")
            elif not self.external.holds_group(entry.group_id):
                self._evicted(self.external.add(entry))
        elif entry.staleness(self.next_number) > self._limits.max_staleness:
            self._drop("local", "stale")
        elif not self.local.holds_group(entry.group_id):
            self._evicted(self.local.add(entry))
        for pool in (self.local, self.external):
            while (oldest := pool.oldest_seq()) is not None and oldest <= self.cursor - MAX_POSITIONS:
                self._evicted(pool.remove(oldest))

    def _hear(self, seq: int, scored: ScoredGroup) -> None:
        if scored.failure is None and scored.rewards and self._keeps(pool_entry(seq, scored)):
            sender = scored.sender_account
            self._heard[sender] = (seq, scored.scored_at)
            self._heard.move_to_end(sender)
            while next(iter(self._heard.values()))[0] <= seq - DUPLICATE_POSITIONS:
                self._heard.popitem(last=False)

    def _evicted(self, entry: PoolEntry | None) -> None:
        if entry is not None:
            self._drop(entry.origin, "overflow")

    def _drop(self, origin: Origin, reason: DropReason) -> None:
        self.drops[(origin, reason)] += 1
        self.dropped_local += origin == "local"

    def _settled_before(self, seq: int) -> bool:
        return seq <= self._known.floor_seq or (seq <= self._known.scored_seq and seq in self._known_settled)

    def _remember(self, group_id: str, seq: int) -> bool:
        """Note a group id. Returns whether it was known."""
        while self._seen and next(iter(self._seen.values())) < seq - DUPLICATE_POSITIONS:
            self._seen.popitem(last=False)
        held = (self.local, self.external, self.replayable)
        known = group_id in self._seen or any(pool.holds_group(group_id) for pool in held)
        self._seen[group_id] = seq
        self._seen.move_to_end(group_id)
        return known

    def _pass_over(self, first: int, last: int) -> None:
        """Positions `first..last` are missing from the stream; those that are not settled are lost.

        How many of them were local is unknown, but never more than the generator may have in
        progress.
        """
        before_news = range(max(first, self._known.floor_seq + 1), min(last, self._known.scored_seq) + 1)
        lost = sum(seq not in self._known_settled for seq in before_news)
        lost += max(0, last - max(first, self._known.scored_seq + 1) + 1)
        if lost:
            self.drops[("local", "lost")] += lost
            self.dropped_local += min(lost, self._limits.in_flight_local)


def _unneeded_seq(state: SamplerState) -> int:
    """Position up to which a sampler that starts from `state` need not read."""
    oldest = oldest_replayable(state.replayable)
    settled = state.floor_seq if oldest is None else min(state.floor_seq, oldest - 1)
    return max(0, min(settled, state.scored_seq - DUPLICATE_POSITIONS))


def state_for_new_stream(state: SamplerState, in_flight_local: int) -> SamplerState:
    """The state to continue with if the scored stream was created anew: its old positions mean
    nothing, and groups in progress are lost.
    """
    return msgspec.structs.replace(
        state, scored_seq=0, floor_seq=0, settled=[], replayable=[], dropped_local=state.dropped_local + in_flight_local
    )


# Replay of local groups: chooses which local groups of earlier batches a batch trains on again
# (`sampler.replay`). Pure.
#
# An informative local group stays replayable for `replay_batches` batches after its first
# batch. A batch adds up to `sampler.replay` of them to I and J, drawn uniformly and without
# replacement. Nothing waits for them, and a group may be replayed in several batches.
#
# The newest batch's state lists their positions by first batch (`SamplerState.replayable`). The
# entries come from the scored stream, which is therefore kept, and read again, from the oldest of
# them on. A group is counted as consumed only with its first batch.


class ReplayPool:
    """The replayable groups: none if `batches` is 0, else those first trained on at most that many
    batches ago.
    """

    def __init__(self, batches: int, known: Sequence[TrainedGroups] = (), next_number: int = 1) -> None:
        """Start from the positions in the newest batch's state; `read_again` adds their entries."""
        self._batches = batches
        self._first_batch = {seq: each.batch for each in known for seq in each.seqs if self._is_young(each.batch, next_number)}
        self._by_seq: dict[int, PoolEntry] = {}
        self._group_ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_seq)

    def __iter__(self) -> Iterator[PoolEntry]:
        return iter([self._by_seq[seq] for seq in sorted(self._by_seq)])

    def awaits(self, seq: int) -> bool:
        """Return whether the group at this position was replayable at the newest batch."""
        return seq in self._first_batch

    def holds_group(self, group_id: str) -> bool:
        return group_id in self._group_ids

    def read_again(self, entry: PoolEntry) -> None:
        """Add a group that is still in the stream and for which `awaits` is true. If the stream was
        created anew it may be a different group.
        """
        if entry.origin == "local" and entry.informative:
            self._hold(entry)

    def trained(self, entries: Iterable[PoolEntry], batch: int) -> None:
        """Batch `batch` is the first with these local groups. Those without an advantage are not
        replayed, because they teach nothing.
        """
        if not self._batches:
            return
        for entry in entries:
            if entry.informative:
                self._first_batch[entry.seq] = batch
                self._hold(entry)
        too_many = max(0, len(self._first_batch) - MAX_REPLAYABLE)
        for _, seq in sorted((first, seq) for seq, first in self._first_batch.items())[:too_many]:
            self.forget(seq)

    def forget(self, seq: int) -> None:
        """This group can no longer be replayed."""
        self._first_batch.pop(seq, None)
        entry = self._by_seq.pop(seq, None)
        if entry is not None:
            self._group_ids.discard(entry.group_id)

    def advance(self, next_number: int) -> None:
        """Forget the groups that batch `next_number` and later ones may not replay."""
        for seq in [seq for seq, first in self._first_batch.items() if not self._is_young(first, next_number)]:
            self.forget(seq)

    def state(self, next_number: int) -> list[TrainedGroups]:
        """The groups that batch `next_number` and later ones may replay, as stored in the batch
        before.
        """
        by_batch: dict[int, list[int]] = {}
        for seq in sorted(self._by_seq):
            if self._is_young(self._first_batch[seq], next_number):
                by_batch.setdefault(self._first_batch[seq], []).append(seq)
        return [TrainedGroups(batch=batch, seqs=seqs) for batch, seqs in sorted(by_batch.items())]

    def _hold(self, entry: PoolEntry) -> None:
        self._by_seq[entry.seq] = entry
        self._group_ids.add(entry.group_id)

    def _is_young(self, first_batch: int, number: int) -> bool:
        return number - first_batch <= self._batches


def replayed(replayable: Sequence[PoolEntry], wanted: int, seed: int) -> list[PoolEntry]:
    """At most `wanted` of the groups, uniformly and without replacement, by position.

    Each group draws its own lot from the batch's seed and its position, and the smallest lots win.
    So a group that is missing from the stream changes no other's lot: leaving it out and drawing
    again gives the same result as if it had never existed.
    """
    return sorted(sorted(replayable, key=lambda entry: _lot(seed, entry.seq))[:wanted], key=lambda entry: entry.seq)


def oldest_replayable(known: Sequence[TrainedGroups]) -> int | None:
    """The first position from which a state's replayable groups must be read again; None if it has
    none.
    """
    return min((seq for each in known for seq in each.seqs), default=None)


def _lot(seed: int, seq: int) -> int:
    return number_from(f"swarm-replay\x00{seed}\x00{seq}", 32)

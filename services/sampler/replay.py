"""Replay of local groups: chooses which local groups of earlier batches a batch trains on again
(`sampler.replay`). Pure.

An informative local group stays replayable for `sampler.replay_batches` batches after its first
batch. A batch adds up to `sampler.replay` of them to I and J, drawn uniformly and without
replacement. Nothing waits for them, and a group may be replayed in several batches.

The newest batch's state lists their positions by first batch (`SamplerState.replayable`). The
entries come from the scored stream, which is therefore kept, and read again, from the oldest of
them on. A group is counted as consumed only with its first batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from services.sampler.pool import PoolEntry
from shared.contracts.sampler_state import MAX_REPLAYABLE, TrainedGroups
from shared.seeds import number_from


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
        """Number of groups that can be drawn."""
        return len(self._by_seq)

    def __iter__(self) -> Iterator[PoolEntry]:
        """Entries by position."""
        return iter([self._by_seq[seq] for seq in sorted(self._by_seq)])

    def awaits(self, seq: int) -> bool:
        """Whether the group at this position was replayable when the newest batch was built."""
        return seq in self._first_batch

    def holds_group(self, group_id: str) -> bool:
        """Whether this group is replayable here."""
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

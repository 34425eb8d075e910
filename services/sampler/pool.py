"""The sampler's record of a scored group, and the bounded pool of such records.

An entry takes a few hundred bytes whatever the group's size: payloads stay in the scored stream and
are read again, by position, for the few groups in a batch. Otherwise a pool of long-context groups
would need tens of gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from shared.contracts.messages import ScoredGroup, TaskRef, source_name
from shared.contracts.sampler_state import OwnRecord, SourceRecord
from shared.contracts.wire import Origin
from shared.rewards import is_informative


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEntry:
    """One scored group in a pool. `seq` is its position in the scored stream."""

    seq: int
    group_id: str
    origin: Origin
    node: str
    """The account that it counts against: its sender's key, a set of known copiers, or its
    node's name if nothing else is known.
    """
    dataset: str
    source: str
    """Its task source; see `task_source`."""
    draw: int
    policy_version: int
    created_at: float
    received_at: float
    """When this node's verifier scored it. For a foreign group this is the only time that is not
    the sender's claim.
    """
    mean_reward: float
    informative: bool
    """Whether its rewards differ, so that it has an advantage."""
    reward_std: float
    """Population standard deviation of its rewards."""
    has_pass: bool
    """Whether one of its completions passes, by this node's scorer; False if no pass is defined."""
    completions: int
    token_count: int
    established: bool = True
    """Whether the sender had earned a whole share when the group was accepted."""
    demonstration: bool = False
    """Whether it is one (`ScoredGroup.demonstration`)."""
    scorer: str | None = None
    """The scorer that gave its rewards; None: not known."""

    def age_s(self, now: float) -> float:
        """Seconds since it was sampled, but at least since it arrived, whatever its sender
        claims.
        """
        return max(0.0, now - min(self.created_at, self.received_at))

    def waited_s(self, now: float) -> float:
        """Seconds since this node scored it, which its sender cannot influence."""
        return max(0.0, now - self.received_at)

    def staleness(self, batch_number: int) -> int:
        """Policy versions between the one that sampled it and the one that batch `batch_number`
        updates; 0 is on-policy.
        """
        return batch_number - 1 - self.policy_version


def pool_entry(seq: int, scored: ScoredGroup) -> PoolEntry:
    """The entry for a scored group (`scored.failure` is None and `scored.rewards` is not empty)."""
    group, rewards = scored.group, scored.rewards
    return PoolEntry(
        seq=seq,
        group_id=scored.group_id,
        origin=scored.origin,
        node=scored.sender_account,
        dataset=group.task.ref.dataset,
        source=task_source(group.task.ref),
        draw=group.draw,
        policy_version=group.policy_version,
        created_at=group.created_at,
        received_at=scored.scored_at,
        mean_reward=sum(rewards) / len(rewards),
        informative=is_informative(rewards),
        reward_std=_deviation(rewards),
        has_pass=any(scored.passed or ()),
        completions=len(group.completions),
        token_count=sum(completion.token_count for completion in group.completions),
        established=scored.established,
        demonstration=scored.demonstration,
        scorer=scored.scorer,
    )


def task_source(ref: TaskRef) -> str:
    """Short name of a dataset under one configuration (`source_name`)."""
    return source_name(ref.dataset, ref.config)


def _deviation(rewards: Sequence[float]) -> float:
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))


class Pool:
    """At most `capacity` entries, each group once. When it is full, the sender with most entries
    loses its oldest.

    Newcomers and established senders each have a part of the room, set by `newcomer_share`, and may
    use what the other class leaves free. So a sender of many groups displaces its own, and
    newcomers, however many, take no more than their part from established senders. Among senders
    with equally many entries, the oldest entry is dropped.
    """

    def __init__(self, capacity: int, newcomer_share: float = 1.0) -> None:
        if capacity < 1:
            raise ValueError(f"pool capacity is {capacity}: at least 1 is needed")
        self.capacity = capacity
        self._newcomer_room = newcomer_share * capacity
        self._by_seq: dict[int, PoolEntry] = {}
        self._group_ids: set[str] = set()
        self._by_account: dict[tuple[bool, str], dict[int, None]] = {}
        """Positions by whether the sender was established, and by sender, in order of arrival."""

    def __len__(self) -> int:
        return len(self._by_seq)

    def __iter__(self) -> Iterator[PoolEntry]:
        return iter(list(self._by_seq.values()))

    def holds_seq(self, seq: int) -> bool:
        return seq in self._by_seq

    def holds_group(self, group_id: str) -> bool:
        return group_id in self._group_ids

    def oldest_seq(self) -> int | None:
        return next(iter(self._by_seq), None)

    def add(self, entry: PoolEntry) -> PoolEntry | None:
        """Add an entry. Returns the one that was dropped for it, if any, which may be this one.

        Raises:
            ValueError: the group is already in the pool, or an entry with a later position is;
                callers must add in stream order.
        """
        if entry.group_id in self._group_ids:
            raise ValueError(f"group {entry.group_id} is in the pool already")
        if self._by_seq and entry.seq <= next(reversed(self._by_seq)):
            raise ValueError(f"position {entry.seq} is not after {next(reversed(self._by_seq))}")
        self._by_seq[entry.seq] = entry
        self._group_ids.add(entry.group_id)
        self._by_account.setdefault((entry.established, entry.node), {})[entry.seq] = None
        return self.remove(self._least_missed()) if len(self._by_seq) > self.capacity else None

    def remove(self, seq: int) -> PoolEntry | None:
        """Remove an entry and return it; None if it is not in the pool."""
        entry = self._by_seq.pop(seq, None)
        if entry is not None:
            self._group_ids.discard(entry.group_id)
            account = (entry.established, entry.node)
            del self._by_account[account][seq]
            if not self._by_account[account]:
                del self._by_account[account]
        return entry

    def _least_missed(self) -> int:
        accounts = self._by_account
        if self._newcomer_room < self.capacity:
            newcomers = sum(len(seqs) for (established, _), seqs in accounts.items() if not established)
            theirs = newcomers > self._newcomer_room or newcomers == len(self._by_seq)
            accounts = {account: seqs for account, seqs in accounts.items() if account[0] != theirs}
        largest = max(map(len, accounts.values()))
        return min(next(iter(seqs)) for seqs in accounts.values() if len(seqs) == largest)


# What the node knows about its policy when a batch is drawn: its recent results on each task
# source. Pure.
#
# The record is a fold over the node's local scored groups in the order of the scored stream. It
# is stored in each batch, so a restarted sampler has the same knowledge as its predecessor.

HALF_LIFE_COMPLETIONS = 128.0
"""A completion counts half when this many newer ones of its source exist: 16 groups of 8. A pass
rate of 0.1 is then known to within 0.02, and the policy of 50 groups ago is forgotten.
"""

RECENT_GROUPS = 4
"""How many consecutive local groups of a source must have failed for the policy to count as failing
on it. With groups of 8, a policy that passes one time in ten fails four in a row in 3 of a hundred
cases; one that passes one time in fifty fails every second time, and has almost nothing to learn
from there.
"""

MASTERED_RATE = 0.9
MASTERED_COMPLETIONS = 32.0
"""A source is mastered at this pass rate, known from at least so many completions."""

MAX_SOURCES = 1024
"""More sources than any node draws from. Beyond it, the source that was observed first is
forgotten.
"""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Discounted counts of this node's completions on one task source, and how many of the newest
    groups failed in a row.
    """

    passes: float = 0.0
    completions: float = 0.0
    failed_groups: int = 0

    @property
    def pass_rate(self) -> float | None:
        """Share of completions that passed; None without any."""
        return min(1.0, self.passes / self.completions) if self.completions else None

    @property
    def mastered(self) -> bool:
        """True if the policy passes so often that foreign groups of the source teach it nothing."""
        return self.completions >= MASTERED_COMPLETIONS and self.passes >= MASTERED_RATE * self.completions

    @property
    def all_fail(self) -> bool:
        """True if no completion of the last `RECENT_GROUPS` local groups passed; False for a source
        with fewer groups.
        """
        return self.failed_groups >= RECENT_GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """Input of a strategy besides the entries. `sources`: this node's record by task source
    (`pool.task_source`).
    """

    sources: Mapping[str, PassRecord] = field(default_factory=lambda: MappingProxyType({}))

    def pass_record(self, source: str) -> PassRecord:
        return self.sources.get(source, PassRecord())


def observed(record: OwnRecord, source: str, rewards: Sequence[float], passed: Sequence[bool] | None) -> OwnRecord:
    """The record after one more scored group of this node from `source` with these rewards (at
    least one). A source without a defined pass (`passed` None) is not in `sources`.
    """
    others = [known for known in record.sources if known.source != source][1 - MAX_SOURCES :]
    mean = sum(rewards) / len(rewards)
    return msgspec.structs.replace(
        record,
        sources=others if passed is None else [*others, _after(record, source, passed)],
        groups=record.groups + 1,
        informative=record.informative + is_informative(rewards),
        reward_sum=record.reward_sum + mean,
        reward_squares=record.reward_squares + mean * mean,
    )


def _after(record: OwnRecord, source: str, passed: Sequence[bool]) -> SourceRecord:
    keep = 0.5 ** (len(passed) / HALF_LIFE_COMPLETIONS)
    before = next(
        (known for known in record.sources if known.source == source), SourceRecord(source=source, completions=0.0, passes=0.0)
    )
    passes = sum(passed)
    return SourceRecord(
        source=source,
        completions=before.completions * keep + len(passed),
        passes=before.passes * keep + passes,
        failed_groups=0 if passes else before.failed_groups + 1,
    )


def knowledge_of(record: OwnRecord) -> Knowledge:
    """The record in the form that strategies read."""
    return Knowledge(
        sources={known.source: PassRecord(known.passes, known.completions, known.failed_groups) for known in record.sources}
    )

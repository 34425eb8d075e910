"""What the node knows about its policy when a batch is drawn: its recent results on each task
source. Pure.

The record is a fold over the node's local scored groups in the order of the scored stream. It is
stored in each batch, so a restarted sampler has the same knowledge as its predecessor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from shared.contracts.sampler_state import OwnRecord, SourceRecord
from shared.rewards import is_informative

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
    def all_fail(self) -> bool:
        """Whether no completion of the last `RECENT_GROUPS` local groups passed; False for a source
        with fewer groups.
        """
        return self.failed_groups >= RECENT_GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What a strategy may use besides the entries. `sources`: this node's record by task source
    (`pool.task_source`).
    """

    sources: Mapping[str, PassRecord] = field(default_factory=lambda: MappingProxyType({}))

    def pass_record(self, source: str) -> PassRecord:
        """This node's record on a source; zeros for an unknown one."""
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

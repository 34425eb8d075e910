"""The user's choice of groups and completions to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from shared.contracts.messages import Batch, BatchItem, Completion, ScoredGroup
from swarm_cli.rollouts.batches import BatchedGroup


def passes(scored: ScoredGroup, place: int) -> bool | None:
    """Whether the answer at this place passes; None: no pass is defined for the group's source."""
    return None if scored.passed is None else scored.passed[place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which groups to show; None means any. `seen`: the datasets of all groups that were looked
    through.

    origin: groups of this node (`local`) or of other nodes (`external`). sender: groups of the node
    with this name. datasets: groups of any of them. group: groups whose id begins with this. marks:
    completions that pass (`right`) or do not (`wrong`), and only groups that have any.
    """

    origin: Literal["local", "external"] | None = None
    sender: str | None = None
    datasets: frozenset[str] | None = None
    group: str = ""
    marks: Literal["right", "wrong"] | None = None
    seen: set[str] = field(default_factory=set, compare=False)

    def groups(self, batch: Batch) -> Iterator[BatchedGroup]:
        """The chosen groups of a batch, in training order."""
        for item in batch.items:
            self.seen.add(item.scored.group.task.ref.dataset)
            if self._asked_for(item):
                yield BatchedGroup(batch, item)

    def completions(self, item: BatchItem) -> list[tuple[int, Completion, float]]:
        """The chosen completions: place in the group, completion, reward."""
        pairs = zip(item.scored.group.completions, item.scored.rewards, strict=False)
        return [
            (place, completion, reward)
            for place, (completion, reward) in enumerate(pairs)
            if self.marks is None or passes(item.scored, place) is (self.marks == "right")
        ]

    def _asked_for(self, item: BatchItem) -> bool:
        scored = item.scored
        return (
            self.origin in (None, scored.origin)
            and self.sender in (None, scored.group.node)
            and (self.datasets is None or scored.group.task.ref.dataset in self.datasets)
            and scored.group_id.startswith(self.group)
            and bool(self.completions(item))
        )

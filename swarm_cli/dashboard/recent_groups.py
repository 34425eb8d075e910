"""Short summaries of the newest groups in nodes' batches, and each step's rewards. Memory is
bounded however long the page runs and whatever the groups hold.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shared.contracts.messages import Batch, BatchItem

GROUPS_A_NODE = 100
"""How many of the newest groups in a node's batches are kept for the list of texts."""
STEPS_A_NODE = 300
NODES_KEPT = 256
QUESTION_BEGINS, QUESTION_ENDS = 44, 66
"""Of a long question a card shows as many characters of its beginning and its end: three lines on a
wide screen. Tasks of one dataset begin alike and differ at the end.
"""
ANSWER_CHARACTERS = 120
REWARDS_SHOWN = 16


@dataclass(frozen=True, slots=True)
class RecentGroup:
    """One line of the list of texts. `place`: position in the batch of `step`, from 0; `best`: the
    beginning of the completion with the highest reward. `never`: no step trained on its batch,
    because the run ended before.
    """

    taker: str
    step: int
    place: int
    sender: str
    dataset: str
    question: str
    best: str
    rewards: tuple[float, ...]
    passed: tuple[bool, ...] | None
    completions: int
    policy_version: int
    at: float
    never: bool = False


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One step's mean rewards; None if it has no such groups."""

    step: int
    at: float
    local: float | None
    foreign: float | None


class RecentGroups:
    """Summaries of the batches that were read so far."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[RecentGroup]] = {}
        self._steps: dict[str, deque[StepPoint]] = {}
        self.batches = 0

    def take(self, taker: str, batch: Batch) -> None:
        """Add a batch of `taker`."""
        self.batches += 1
        recent = self._recent.pop(taker, None) or deque(maxlen=GROUPS_A_NODE)
        self._recent[taker] = recent
        if len(self._recent) > NODES_KEPT:
            forgotten = next(iter(self._recent))
            del self._recent[forgotten]
            self._steps.pop(forgotten, None)
        self._steps.setdefault(taker, deque(maxlen=STEPS_A_NODE)).append(_point(batch))
        for place, item in enumerate(batch.items):
            recent.append(_summary(taker, batch, place, item))

    def names(self, node: str) -> bool:
        """Whether a batch that was read is the node's, or a group that is kept was sent by it."""
        return node in self._steps or any(node == group.sender for groups in list(self._recent.values()) for group in list(groups))

    def steps(self, taker: str) -> list[StepPoint]:
        """The newest steps of a node, oldest first."""
        return list(self._steps.get(taker, ()))

    def recent(self, most: int, taker: str | None = None, last: Mapping[str, int] | None = None) -> list[RecentGroup]:
        """The newest groups, newest first, of one node or of all.

        last: of a run that has ended, the last step of each node of which it is known. Groups of
            batches that were made for a later one come after all others.
        """
        chosen: Sequence[deque[RecentGroup]] = (
            list(self._recent.values()) if taker is None else [self._recent[taker]] if taker in self._recent else []
        )
        told = last or {}
        found = [
            replace(group, never=group.step > told.get(group.taker, group.step)) for groups in chosen for group in list(groups)
        ]
        return sorted(found, key=lambda group: (not group.never, group.at, group.place), reverse=True)[:most]


def _point(batch: Batch) -> StepPoint:
    by_origin: dict[str, list[float]] = {"local": [], "external": []}
    for item in batch.items:
        if not item.replayed:
            by_origin[item.scored.origin] += item.scored.rewards
    local, foreign = (sum(rewards) / len(rewards) if rewards else None for rewards in by_origin.values())
    return StepPoint(batch.number, batch.created_at, local, foreign)


def _summary(taker: str, batch: Batch, place: int, item: BatchItem) -> RecentGroup:
    """A group's summary, cut before it is kept: a group may hold megabytes, and hundreds
    are kept.
    """
    scored = item.scored
    group, rewards = scored.group, scored.rewards
    best = max(range(min(len(rewards), len(group.completions))), key=lambda each: rewards[each], default=0)
    return RecentGroup(
        taker=taker,
        step=batch.number,
        place=place,
        sender=group.node,
        dataset=group.task.ref.dataset,
        question=both_ends(group.task.question),
        best=group.completions[best].text[:ANSWER_CHARACTERS],
        rewards=tuple(rewards[:REWARDS_SHOWN]),
        passed=None if scored.passed is None else tuple(scored.passed[:REWARDS_SHOWN]),
        completions=len(group.completions),
        policy_version=group.policy_version,
        at=batch.created_at,
    )


def both_ends(question: str) -> str:
    """A question for a card: the whole of a short one, beginning and end of a long one, in whole
    words where they have spaces.
    """
    if len(question) <= QUESTION_BEGINS + QUESTION_ENDS:
        return question
    head, tail = question[:QUESTION_BEGINS], question[-2 * QUESTION_ENDS :].rstrip()[-QUESTION_ENDS:]
    head, tail = re.sub(r"(?<=\s)\S*$", "", head), re.sub(r"^\S*\s", "", tail)
    return f"{head.rstrip()} … {tail}"

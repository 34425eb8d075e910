"""Short summaries of the newest groups in nodes' batches, and each step's rewards. Memory is
bounded however long the page runs and whatever the groups hold.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from shared.contracts.codec import decode
from shared.contracts.messages import Batch, BatchItem
from shared.contracts.subjects import node_batches_stream
from shared.contracts.wire import MessageError
from shared.rewards import mean_parts
from shared.text import cut_text, visible
from shared.transport.base import NotConnected, StoredMessage, Transport, TransportError
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.rollouts.records import RecordedBatches
from swarm_cli.rollouts.shown import left_words

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
LEFT_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group in a list. `place`: position in the batch of `step`, from 0; `best`: the beginning of
    the completion with the highest reward; `left`: how many answers left the group.
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
    left: str
    policy_version: int
    at: float

    def card(self, names: FileNames = UNNAMED) -> dict[str, Any]:
        """The page's object about it. names: of the files that are datasets."""
        texts = {"question": cut_text(self.question, 240), "best": cut_text(self.best, 120)}
        return asdict(self) | texts | {"dataset": names.shown(self.dataset)}


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One step's mean rewards; None if it has no such groups. scorer: by which rewards; None: by
    two, or not told. tokens, cut_off: mean length of local answers, and the share that ended at the
    length limit. parts: of several rewards, the mean of each over local answers.
    """

    step: int
    at: float
    local: float | None
    foreign: float | None
    scorer: str | None = None
    tokens: float | None = None
    cut_off: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class RecentGroups:
    """Summaries of the batches that were read so far."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[GroupSummary]] = {}
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
            recent.append(summary(taker, batch, place, item))

    def names(self, node: str) -> bool:
        """Check whether a batch that was read is the node's, or a kept group was sent by it."""
        return node in self._steps or any(node == group.sender for groups in list(self._recent.values()) for group in list(groups))

    def steps(self, taker: str) -> list[StepPoint]:
        """The newest steps of a node, oldest first."""
        return list(self._steps.get(taker, ()))

    def recent(self, most: int, taker: str | None = None) -> list[GroupSummary]:
        """The newest groups, newest first, of one node or of all."""
        chosen: Sequence[deque[GroupSummary]] = (
            list(self._recent.values()) if taker is None else [self._recent[taker]] if taker in self._recent else []
        )
        found = [group for groups in chosen for group in list(groups)]
        return sorted(found, key=lambda group: (group.at, group.place), reverse=True)[:most]


def _point(batch: Batch) -> StepPoint:
    """The step of a batch; its answers are counted as the trainer's record counts them."""
    by_origin: dict[str, list[float]] = {"local": [], "external": []}
    for item in batch.items:
        if not item.replayed:
            by_origin[item.scored.origin] += item.scored.rewards
    local, foreign = (sum(rewards) / len(rewards) if rewards else None for rewards in by_origin.values())
    point = StepPoint(batch.number, batch.created_at, local, foreign)
    own = [item.scored for item in batch.items if item.scored.origin == "local" and not item.replayed and item.scored.rewards]
    answers = [answer for scored in own for answer in scored.group.completions]
    if not answers:
        return point
    return replace(
        point,
        tokens=fmean(answer.token_count for answer in answers),
        cut_off=fmean(answer.finish_reason == "length" for answer in answers),
        parts=mean_parts(*(scored.parts for scored in own)),
    )


def summary(taker: str, batch: Batch, place: int, item: BatchItem) -> GroupSummary:
    """A group's summary, cut before it is kept: a group may hold megabytes, and hundreds
    are kept.
    """
    scored = item.scored
    group, rewards = scored.group, scored.rewards
    best = max(range(min(len(rewards), len(group.completions))), key=lambda each: rewards[each], default=0)
    return GroupSummary(
        taker=taker,
        step=batch.number,
        place=place,
        sender=group.node,
        dataset=group.task.ref.dataset,
        question=both_ends(group.task.text),
        best=item.scored.shown(best)[:ANSWER_CHARACTERS],
        rewards=tuple(rewards[:REWARDS_SHOWN]),
        passed=None if scored.passed is None else tuple(scored.passed[:REWARDS_SHOWN]),
        completions=len(group.completions),
        left=visible(left_words(scored), LEFT_CHARACTERS),
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


BATCHES_BACK = 30
"""How many of its newest batches are read when a node is first seen; also the most per look."""
BATCH_BYTES = 32 * 2**20
"""A larger batch is not read for the list of texts, only when its own page is opened."""


class BatchFollower:
    """The position in each node's log, and what was read so far."""

    def __init__(self) -> None:
        self.recent = RecentGroups()
        self._read_to: dict[str, int] = {}
        self._at = ""
        self._held: dict[str, tuple[int, int]] = {}

    async def follow(self, plane: Transport, nodes: Sequence[str]) -> None:
        """Read the new batches of `nodes`. It may be cancelled at any time: the next call continues
        after the last batch read, and starts with the node that was being read.

        Raises:
            NotConnected: the server does not answer.
        """
        first = nodes.index(self._at) if self._at in nodes else 0
        for node in (*nodes[first:], *nodes[:first]):
            self._at = node
            try:
                await self._follow_node(plane, node)
            except NotConnected:
                raise
            except TransportError:
                continue  # it has no log yet

    async def read_recorded(self, node: str, batches: RecordedBatches) -> None:
        """Read the newest batches on record of a node whose run has ended."""
        newest: list[Batch] = []
        async for batch in batches.back_from(await batches.last_seq()):
            newest.append(batch)
            if len(newest) == BATCHES_BACK:
                break
        for batch in reversed(newest):
            self.recent.take(node, batch)
        if newest:
            self._held[node] = (batches.steps[0], newest[0].number)

    def first_held(self, node: str) -> int:
        """The oldest step whose batch the node's log holds. A log has a batch for each step, in
        order, so it is counted back from the newest that was read.
        """
        steps, (first_seq, read_seq) = self.recent.steps(node), self._held.get(node, (0, 0))
        return steps[-1].step - (read_seq - first_seq) if steps else 0

    async def _follow_node(self, plane: Transport, node: str) -> None:
        stream = node_batches_stream(node)
        state = await plane.stream_state(stream)
        known = self._read_to.get(node)
        if known is None or known > state.last_seq:  # a new node, or a new log under the old name
            known = state.first_seq - 1
        self._held[node] = (state.first_seq, self._held.get(node, (0, 0))[1])
        oldest = max(known + 1, state.last_seq - BATCHES_BACK + 1)
        self._read_to[node] = oldest - 1
        while self._read_to[node] < state.last_seq:
            messages = await plane.read(stream, self._read_to[node] + 1, 1)
            if not messages or messages[0].seq > state.last_seq:
                break
            batch = await _batch(plane, messages[0])
            # No await between counting a batch and marking it as read, so that none counts twice.
            if batch is not None:
                self.recent.take(node, batch)
                self._held[node] = (state.first_seq, messages[0].seq)
            self._read_to[node] = messages[0].seq
        self._read_to[node] = state.last_seq


async def _batch(plane: Transport, message: StoredMessage) -> Batch | None:
    """The message's batch; None if it is too large or cannot be decoded."""
    if message.size_bytes > BATCH_BYTES:
        return None
    try:
        return decode(await plane.payload(message), Batch)
    except MessageError:
        return None

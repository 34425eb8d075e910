"""The last refusals, so that people can ask why a group was refused. Pure.

The memory is bounded in every respect and divided among senders, so that nobody's flood pushes out
what is known of others. A sender has a fixed number of places, and its own entries are dropped
first, starting with its most frequent reason. Names that belong to a key and names that anybody may
claim have separate places.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from shared.contracts.messages import RolloutGroup

KNOWN_SENDERS = 64
STRANGERS = 32
OF_A_SENDER = 24
"""Refusals kept per sender: at most (64 + 32) * 24 in total, each under 3 KB."""

QUESTION_BYTES = 400
ANSWERS = 4
ANSWER_BYTES = 300
DETAIL_BYTES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedGroup:
    """One refusal. sender: as the subject says, a claim; "" if there is none. group_id: of the
    signed bytes, "" if no valid signature was found; claimed_id: what a header says instead.
    excerpt: part of the text, if the border could decode it at all.
    """

    time: float
    reason: str
    detail: str
    sender: str
    group_id: str
    claimed_id: str
    swarm_seq: int
    stored_at: float
    excerpt: dict[str, Any] | None = None

    def as_object(self) -> dict[str, Any]:
        """The entry as it is written to the file."""
        return {
            "time": round(self.time, 3),
            "reason": self.reason,
            "detail": _cut(self.detail, DETAIL_BYTES),
            "sender": self.sender,
            "id": self.group_id,
            "claimed_id": self.claimed_id,
            "swarm_seq": self.swarm_seq,
            "stored_at": round(self.stored_at, 3),
            **({"group": self.excerpt} if self.excerpt is not None else {}),
        }


def excerpt_of(group: RolloutGroup) -> dict[str, Any]:
    """A bounded part of a decoded group: its task, and how it begins."""
    ref = group.task.ref
    return {
        "dataset": ref.dataset,
        "seed": ref.seed,
        "index": ref.index,
        "draw": group.draw,
        "policy_version": group.policy_version,
        "created_at": group.created_at,
        "question": _cut(group.task.question, QUESTION_BYTES),
        "completions": len(group.completions),
        "answers": [_cut(completion.text, ANSWER_BYTES) for completion in group.completions[:ANSWERS]],
    }


class RefusedMemory:
    """The last refusals of each of the last senders."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, list[RefusedGroup]] = OrderedDict()
        self._strangers: OrderedDict[str, list[RefusedGroup]] = OrderedDict()

    def note(self, refused: RefusedGroup, *, known: bool) -> None:
        """Remember a refusal. known: whether its sender's name belongs to a key."""
        mine, others, most = (self._known, self._strangers, KNOWN_SENDERS) if known else (self._strangers, self._known, STRANGERS)
        # When a name gets a key, its earlier entries move with it.
        kept = mine.pop(refused.sender, None) or others.pop(refused.sender, None) or []
        kept.append(refused)
        if len(kept) > OF_A_SENDER:
            del kept[_gives_way(kept)]
        mine[refused.sender] = kept
        if len(mine) > most:
            mine.popitem(last=False)

    def all(self) -> list[tuple[RefusedGroup, bool]]:
        """All refusals, oldest first, each with whether its sender's name has a key."""
        pools = ((self._known, True), (self._strangers, False))
        found = [(each, known) for senders, known in pools for kept in senders.values() for each in kept]
        return sorted(found, key=lambda pair: pair[0].time)


def _cut(text: str, size_bytes: int) -> str:
    """The beginning of `text` that takes at most `size_bytes` as JSON, in which a character may
    take twelve bytes.
    """
    cut = text[:size_bytes]
    while len(json.dumps(cut)) > size_bytes + 2:
        cut = cut[: len(cut) // 2]
    return cut


def _gives_way(kept: list[RefusedGroup]) -> int:
    """The entry to drop: the oldest one of the most frequent reason."""
    counts = Counter(each.reason for each in kept)
    most = max(counts.values())
    return next(place for place, each in enumerate(kept) if counts[each.reason] == most)

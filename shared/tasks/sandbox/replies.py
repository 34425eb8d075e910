"""Validates the form of scorer processes' replies, because foreign text may have taken over the
process. Pure.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgpack
import msgspec
from msgspec import Meta

from shared.contracts.limits import MAX_TEXT_CHARS
from shared.contracts.messages import MAX_COMPLETIONS
from shared.contracts.wire import Reward
from shared.rewards import Mark
from shared.tasks.sandbox.protocol import MAX_ANSWERS

MAX_DETAIL_CHARS = 700
MAX_VERDICT_BYTES = 64 * 2**10
"""A scored group's reply contains a reason, its detail, and rewards and marks of ten bytes each."""
MAX_TASK_BYTES = 8 * 2**20
"""Room for a derived task as well: its three texts have the limits of
`shared.contracts.messages.Task`, with four bytes per character.
"""

Reason = Annotated[str, Meta(pattern="^task_[a-z]{1,32}$")]
"""Reasons that a forked process may give. `scoring_timeout` and `dropped` are determined by its
parents.
"""
Detail = Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)]
Question = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Metadata = Annotated[str, Meta(max_length=1_048_576)]
TaskTexts = tuple[Question, Question | None, Metadata]

Rewards = list[Reward | None]
Marks = list[Annotated[int, Meta(ge=int(min(Mark)), le=int(max(Mark)))]]
Verdict = tuple[Reason | None, Detail, Rewards, Marks, TaskTexts | None]
"""Reply of a process that scored one foreign group: reason, detail, rewards, marks, task."""

Count = Annotated[int, Meta(ge=0, le=MAX_ANSWERS)]
ForeignResult = tuple[str | None, str, Rewards, Marks, TaskTexts | None, Annotated[float, Meta(ge=0.0)], Count, Count]
"""Result of a forker; see the docstring of `forker`."""

Rewarded = tuple[Rewards, Marks, TaskTexts | None, Detail]
"""Rewards, marks and task, and what the scorer raised, if it did."""
Failed = tuple[str, str]


class BrokenReply(ValueError):
    """Bytes that no uncompromised scorer sends."""


def decode_verdict(message: bytes, want_task: bool) -> Verdict:
    """Decode the reply of a forked process. Nothing in it is longer than `most_bytes`, and no list
    longer than a group.

    Raises:
        BrokenReply: it has the wrong form, or contains a task although none was requested.
    """
    try:
        content = msgpack.unpackb(
            message,
            raw=False,
            unicode_errors="surrogatepass",
            max_array_len=MAX_COMPLETIONS,
            max_map_len=0,
            max_bin_len=0,
            max_ext_len=0,
        )
    except ValueError as error:
        raise BrokenReply(type(error).__name__) from None
    verdict: Verdict = checked(content, Verdict)
    reason, detail, rewards, marks, task = verdict
    if task is not None and not want_task:
        raise BrokenReply("a task that nobody asked for")
    return reason, printable(detail), rewards, marks, task


def most_bytes(want_task: bool) -> int:
    """Largest length of a forked process's reply, in bytes."""
    return MAX_TASK_BYTES if want_task else MAX_VERDICT_BYTES


def checked(content: Any, form: Any) -> Any:
    """The content, if it has the form of this type.

    Raises:
        BrokenReply: it does not.
    """
    try:
        return msgspec.convert(content, form)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise BrokenReply(printable(str(error))[:200]) from None


def printable(text: str) -> str:
    """`text` as one line without control characters, for people to read."""
    return "".join(char if char.isprintable() else " " for char in text)

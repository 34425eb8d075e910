"""Validates the form of scorer processes' replies, because foreign text may have taken over the
process. Pure.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgpack
import msgspec
from msgspec import Meta

from shared.contracts.limits import MAX_TEXT_CHARS
from shared.tasks.sandbox.protocol import MAX_ANSWERS

MAX_DETAIL_CHARS = 700
MAX_VERDICT_BYTES = 64 * 2**10
"""A scored group's reply contains a reason and its detail; the rewards are in shared memory."""
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

Verdict = tuple[Reason | None, Detail, TaskTexts | None]
"""Reply of a process that scored one foreign group: reason, detail, task."""

Reward = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=0, le=MAX_ANSWERS)]
ForeignResult = tuple[str | None, str, list[Reward], TaskTexts | None, Annotated[float, Meta(ge=0.0)], Count, Count]
"""Result of a forker; see the docstring of `forker`."""

Rewarded = tuple[list[Reward], TaskTexts | None]
Explained = tuple[list[Reward], TaskTexts | None, Detail]
"""Rewards and task, and what the scorer raised, if it did."""
Failed = tuple[str, str]


class BrokenReply(ValueError):
    """Bytes that no uncompromised scorer sends."""


def decode_verdict(message: bytes, want_task: bool) -> Verdict:
    """Decode the reply of a forked process. Nothing in it is longer than `most_bytes`, and no list
    longer than three.

    Raises:
        BrokenReply: it has the wrong form, or contains a task although none was requested.
    """
    try:
        content = msgpack.unpackb(
            message,
            raw=False,
            unicode_errors="surrogatepass",
            max_array_len=3,
            max_map_len=0,
            max_bin_len=0,
            max_ext_len=0,
        )
    except ValueError as error:
        raise BrokenReply(type(error).__name__) from None
    verdict: Verdict = checked(content, Verdict)
    reason, detail, task = verdict
    if task is not None and not want_task:
        raise BrokenReply("a task that nobody asked for")
    return reason, printable(detail), task


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

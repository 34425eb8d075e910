"""The protocol between the sandbox's parent and its workers.

A frame is a little-endian uint32 length and that many bytes of MessagePack. The parent sends
batches: lists of jobs `[dataset, config, seed, index, expected task or None, verifier, texts, want
task]`, where a text is None if it must not be tried again and a list of turns where an environment
is played, and a task is its `shared.tasks.prompt.content`. With a judge's replies a job has these
as well. It may send the next batch while the worker is still busy with one. The worker answers in
the order of the jobs, with frames that contain the results of several: `[rewards, marks, task or
None, what the scorer raised, values of each of several rewards, what an environment said, what was
printed]`, `[None, what to ask a judge, task or None, what the scorer raised]` or `[reason, detail]`
for each. Before each step it writes its position into shared memory (`Progress`), so that the
parent knows which answer to blame when it has to kill the worker.
"""

from __future__ import annotations

import mmap
import struct
from typing import Annotated, Any

import msgpack
import msgspec
from msgspec import Meta, Struct

from shared.contracts.limits import MAX_REWARD_PARTS
from shared.contracts.messages import MAX_COMPLETIONS, Replies
from shared.contracts.wire import Reward
from shared.reward_files import MAX_REQUEST_CHARS, MAX_REQUESTS
from shared.rewards import Mark
from shared.tasks.prompt import Content

MAX_FRAME_BYTES = 512 * 2**20
READY = "ready"

DERIVING = 0
"""The step of a job in which its task is derived; answer k is step k + 1."""
STEP_BITS = 24
MAX_ANSWERS = 2**STEP_BITS - 2

_LENGTH = struct.Struct("<I")
_NOWHERE = -1
PROGRESS_BYTES = mmap.PAGESIZE


def pack_frame(content: Any) -> bytes:
    """`content` as the bytes of a frame."""
    body: bytes = msgpack.packb(content, use_bin_type=True, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Length of the body, from the 4 bytes before it."""
    length: int = _LENGTH.unpack(header)[0]
    return length


def unpack_body(body: bytes) -> Any:
    """The content of a frame's body."""
    return msgpack.unpackb(body, raw=False, unicode_errors="surrogatepass")


class Progress:
    """A worker's position: one 64-bit word in shared memory, so that it is never half written.

    Jobs are numbered from 0 over the worker's whole life. `word[0]` is `number << STEP_BITS |
    step`, or -1 between batches.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PROGRESS_BYTES)
        self.word = memoryview(self._map).cast("q")

    def rest(self) -> None:
        """Record that no job is being worked on."""
        self.word[0] = _NOWHERE

    def read(self) -> tuple[int, int] | None:
        """Number and step of the job begun last; None between batches."""
        value = self.word[0]
        return None if value < 0 else (value >> STEP_BITS, value & (2**STEP_BITS - 1))

    def close(self) -> None:
        self.word.release()
        self._map.close()


# Validates the form of scorer processes' replies, because foreign text may have taken over the
# process. Pure.


MAX_DETAIL_CHARS = 700
MAX_VERDICT_BYTES = 64 * 2**10
"""A scored group's reply contains a reason, its detail, and rewards and marks of ten bytes each."""
MAX_TASK_BYTES = 8 * 2**20
"""Room for a derived task as well: its texts have the limits of
`shared.contracts.messages.Task`, with four bytes per character.
"""

Reason = Annotated[str, Meta(pattern="^task_[a-z]{1,32}$")]
"""Reasons that a forked process may give. `scoring_timeout` and `dropped` are determined by its
parents.
"""
Detail = Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)]

Rewards = list[Reward | None]
Marks = list[Mark]
AllSaid = list[Replies]
"""What an environment said to the turns of each answer; empty where none was played."""
Verdict = tuple[Reason | None, Detail, Rewards, Marks, Content | None, AllSaid]
"""Reply of a process that scored one foreign group: reason, detail, rewards, marks, task and what
an environment said.
"""

Count = Annotated[int, Meta(ge=0, le=MAX_ANSWERS)]
ForeignResult = tuple[str | None, str, Rewards, Marks, Content | None, AllSaid, Annotated[float, Meta(ge=0.0)], Count, Count]
"""Result of a forker; see the docstring of `forker`."""


class Rewarded(Struct, array_like=True, forbid_unknown_fields=True):
    """Rewards, marks and task, what the scorer raised, if it did, of several rewards the values of
    each, by its name, what an environment said, and what was printed. It is a class because every
    local group is one, and msgspec finds a class's form sooner than a tuple's.
    """

    rewards: Rewards
    marks: Marks
    task: Content | None
    raised: Detail
    parts: dict[Detail, Rewards] = {}
    said: AllSaid = []
    printed: Detail = ""


Failed = tuple[str, str]

Text = Annotated[str, Meta(max_length=MAX_REQUEST_CHARS)]
Asked = Annotated[list[Text], Meta(max_length=MAX_REQUESTS)] | Mark
Asking = tuple[None, Annotated[list[list[Asked]], Meta(max_length=MAX_REWARD_PARTS)], Content | None, Detail]
"""What to ask a judge about each answer, for each of its rewards, before there are rewards."""


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
    reason, detail, rewards, marks, task, said = verdict
    if task is not None and not want_task:
        raise BrokenReply("a task that nobody asked for")
    return reason, printable(detail), rewards, marks, task, said


def most_bytes(want_task: bool, plays: bool) -> int:
    """Largest length of a forked process's reply, in bytes. plays: it tells what an environment
    said.
    """
    return MAX_TASK_BYTES if want_task or plays else MAX_VERDICT_BYTES


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

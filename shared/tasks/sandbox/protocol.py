"""The protocol between the sandbox's parent and its workers.

A frame is a little-endian uint32 length and that many bytes of MessagePack. The parent sends
batches: lists of jobs `[dataset, config, seed, index, expected task or None, verifier, texts, want
task]`, where a text is None if it must not be tried again, and a task is `[question, answer,
metadata]`. It may send the next batch while the worker is still busy with one. The worker answers
in the order of the jobs, with frames that contain the results of several: `[rewards, marks, task or
None, what the scorer raised]` or `[reason, detail]` for each. Before each step it writes its
position into shared memory (`Progress`), so that the parent knows which answer to blame when it has
to kill the worker.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import msgpack

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
        """Map `PROGRESS_BYTES` of an open file."""
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
        """Unmap the file."""
        self.word.release()
        self._map.close()

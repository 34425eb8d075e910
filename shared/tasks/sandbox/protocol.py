"""What parent and worker of the sandbox say to each other.

A frame is a little-endian uint32 length and that many bytes of MessagePack. The parent sends a batch, a list of jobs
`[dataset, config, seed, index, expected digest or None, texts, want task]` (a text is None where it is not to be tried again). The
worker answers with one frame a job soon after it is done: `[position, rewards, task or None]` or `[position, reason, detail]`.
Before each step it writes into shared memory where it is (`Progress`): the parent knows whom to blame when it has to kill it.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from typing import Any

import msgpack

from shared.messages import Task

MAX_FRAME_BYTES = 512 * 2**20
DERIVING = -1
READY = "ready"

_LENGTH = struct.Struct("<I")
_PROGRESS = struct.Struct("<qqq")
PROGRESS_BYTES = mmap.PAGESIZE


def pack_frame(content: Any) -> bytes:
    """A frame as bytes."""
    body: bytes = msgpack.packb(content, use_bin_type=True, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Length of the body that follows these 4 bytes."""
    length: int = _LENGTH.unpack(header)[0]
    return length


def unpack_body(body: bytes) -> Any:
    """Content of a frame."""
    return msgpack.unpackb(body, raw=False, unicode_errors="surrogatepass")


def task_digest(task: Task) -> bytes:
    """SHA-256 over question, answer and metadata: stands for them where only equality matters."""
    parts = [task.question, task.answer, task.metadata]
    packed: bytes = msgpack.packb(parts, use_bin_type=True, unicode_errors="surrogatepass")
    return hashlib.sha256(packed).digest()


class Progress:
    """Position of a worker: (batch number, job, answer), answer `DERIVING` while the task is being derived."""

    def __init__(self, descriptor: int) -> None:
        """Map `PROGRESS_BYTES` of an open file."""
        self._map = mmap.mmap(descriptor, PROGRESS_BYTES)

    def write(self, batch: int, job: int, answer: int) -> None:
        """Say what is about to be done."""
        _PROGRESS.pack_into(self._map, 0, batch, job, answer)

    def read(self) -> tuple[int, int, int]:
        """What was about to be done last."""
        batch, job, answer = _PROGRESS.unpack_from(self._map, 0)
        return batch, job, answer

    def close(self) -> None:
        """Unmap."""
        self._map.close()

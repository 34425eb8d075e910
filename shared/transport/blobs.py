"""Claim checks: a payload too large for one message lies in chunks in a companion stream, the message only refers to it.

The reference travels in a header, so that a reader knows the size before it fetches anything:

    Swarm-Blob: <size in bytes> <sha256> <sequences of the chunks, as runs: 12-40,45>

Who publishes stores the chunks first, so that a stored message never refers to chunks that were not stored. Chunks whose
message never came (the publisher was killed in between) are swept with `sweep_before`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shared.transport.base import Retention, StoredMessage, StreamSpec, TransportError

BLOB_HEADER = "Swarm-Blob"
HEADER_ROOM_BYTES = 4096
"""What a message's headers may take beside its payload: streams and servers limit the sum of both."""
MAX_CHUNK_BYTES = 960 * 1024
"""Measured with batched direct get: larger chunks are no faster, smaller ones cost more messages."""
MAX_CHUNKS = 4096
ORPHAN_AGE_S = 600.0
"""A chunk this much older than the oldest message of its stream belongs to no message that is kept."""
_NO_COMPANION_BYTES = 512 * 1024
_PARALLEL = 8


def companion_name(stream: str) -> str:
    """Name of the stream that holds the chunks of `stream`."""
    return f"{stream}_BLOBS"


def companion_subject(subject: str) -> str:
    """Subject of the chunks of messages on `subject`; who may publish the one must be allowed the other."""
    return f"blob.{subject}"


def companion(spec: StreamSpec) -> StreamSpec | None:
    """The companion stream of `spec`, with the same bounds; None when its payloads are too small ever to need one."""
    if 0 <= spec.max_msg_bytes <= _NO_COMPANION_BYTES:
        return None
    return replace(
        spec,
        name=companion_name(spec.name),
        subjects=tuple(companion_subject(subject) for subject in spec.subjects),
        retention=Retention.LIMITS,
        max_msgs=-1,
        max_msg_bytes=-1,
        description=f"Chunks of large payloads of {spec.name}",
    )


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a blob lies: its size, its SHA-256 in hex and the sequences of its chunks in order."""

    size_bytes: int
    sha256: str
    chunks: tuple[int, ...]

    def header(self) -> str:
        """As it stands in the header."""
        runs = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in _runs(self.chunks))
        return f"{self.size_bytes} {self.sha256} {runs}"

    @classmethod
    def parse(cls, header: str) -> Reference:
        """Inverse of `header`; refuses what would cost more than it is worth. Raises TransportError."""
        try:
            size, sha256, runs = header[: 24 * MAX_CHUNKS].split(" ")
            size_bytes, chunks = int(size), tuple(_expand(runs))
            if size_bytes < 0 or len(sha256) != 64 or not chunks:
                raise ValueError("out of range")
        except ValueError as error:
            raise TransportError(f"malformed blob reference {header[:100]!r}: {error}: the message cannot be read") from None
        return cls(size_bytes, sha256, chunks)


class ChunkStore(Protocol):
    """What storing and fetching blobs needs of a transport."""

    async def put_chunk(self, subject: str, chunk: bytes, *, stream: str, timeout_s: float) -> int:
        """Store one chunk, return its sequence."""
        ...

    async def read(self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0) -> list[StoredMessage]:
        """Messages in order, as in `Transport.read`."""
        ...

    async def drop(self, stream: str, seq: int) -> None:
        """Forget one chunk."""
        ...


def reference_of(message: StoredMessage) -> Reference | None:
    """The reference that a message carries, or None if its payload is inline."""
    header = message.headers.get(BLOB_HEADER)
    return None if header is None else Reference.parse(header)


def size_of(headers_blob: str | None, inline: bytes) -> int:
    """Payload size of a message as it claims: of the blob if it refers to one. A malformed reference counts as 2**62."""
    if headers_blob is None:
        return len(inline)
    size = headers_blob.split(" ", 1)[0]
    return int(size) if size.isascii() and size.isdigit() and len(size) < 19 else 2**62


async def put(store: ChunkStore, subject: str, payload: bytes, *, stream: str, chunk_bytes: int, timeout_s: float) -> Reference:
    """Store `payload` in chunks. Chunks of a failed attempt are dropped. Raises what `put_chunk` raises."""
    size = min(chunk_bytes, MAX_CHUNK_BYTES)
    chunks = [payload[start : start + size] for start in range(0, len(payload), size)]
    slots = asyncio.Semaphore(_PARALLEL)

    async def one(chunk: bytes) -> int:
        async with slots:
            return await store.put_chunk(companion_subject(subject), chunk, stream=companion_name(stream), timeout_s=timeout_s)

    sha256 = await asyncio.to_thread(lambda: hashlib.sha256(payload).hexdigest())
    stored = await asyncio.gather(*(one(chunk) for chunk in chunks), return_exceptions=True)
    failures = [outcome for outcome in stored if isinstance(outcome, BaseException)]
    sequences = [outcome for outcome in stored if isinstance(outcome, int)]
    if failures:
        await drop(store, stream, sequences)
        raise failures[0]
    return Reference(len(payload), sha256, tuple(sequences))


async def fetch(store: ChunkStore, stream: str, reference: Reference, *, timeout_s: float) -> bytes:
    """Assemble and check a blob. Raises TransportError if a chunk is gone or the bytes differ."""
    name = companion_name(stream)
    assembled = bytearray()
    for first, last in _runs(reference.chunks):
        expected = first
        while expected <= last:
            messages = await store.read(name, expected, last - expected + 1, timeout_s)
            if not messages:
                raise _gone(name, expected)
            for message in messages:
                if message.seq != expected or message.inline is None:
                    raise _gone(name, expected)
                assembled += message.inline
                expected += 1
            if len(assembled) > reference.size_bytes:
                raise TransportError(f"blob in {name} is larger than its stated {reference.size_bytes} bytes: refused")
    payload = bytes(assembled)
    found = await asyncio.to_thread(lambda: hashlib.sha256(payload).hexdigest())
    if len(payload) != reference.size_bytes or found != reference.sha256:
        raise TransportError(
            f"blob in {name}: expected {reference.size_bytes} bytes with sha256 {reference.sha256[:8]}.., "
            f"found {len(payload)} with {found[:8]}..: the message cannot be used"
        )
    return payload


async def drop(store: ChunkStore, stream: str, chunks: Sequence[int]) -> None:
    """Forget chunks, as far as the server lets us: what remains is bounded by the companion stream's limits."""
    await asyncio.gather(*(store.drop(companion_name(stream), seq) for seq in chunks), return_exceptions=True)


def sweep_before(oldest_message_at: float | None, now: float) -> float:
    """Chunks stored before this time belong to no kept message. `oldest_message_at` is None for an empty stream."""
    return (now if oldest_message_at is None else oldest_message_at) - ORPHAN_AGE_S


def _gone(name: str, seq: int) -> TransportError:
    return TransportError(f"blob in {name}: chunk {seq} is gone (the stream's limits passed it): the message cannot be used")


def _runs(sequences: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = previous = sequences[0]
    for seq in sequences[1:]:
        if seq != previous + 1:
            yield start, previous
            start = seq
        previous = seq
    yield start, previous


def _expand(runs: str) -> Iterator[int]:
    count = 0
    for run in runs.split(","):
        first, _, last = run.partition("-")
        begin, end = int(first), int(last or first)
        count += end - begin + 1
        if not 0 < begin <= end < 2**62 or count > MAX_CHUNKS:
            raise ValueError("chunks out of range")
        yield from range(begin, end + 1)

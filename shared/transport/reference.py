"""The reference that a message carries instead of a payload that is too large for it, and which
parts of it can be trusted before reading. Pure.

    Swarm-Blob: <size in bytes> <sha256> <sequences of the chunks, as runs: 12-40,45> <seal>

Chunks can be read before the message that refers to them is stored. They are encrypted
(`shared.transport.seal`), and the key is in the reference, so that nobody can read a payload before
its message is in the stream. Chunks without a seal are not encrypted; earlier versions stored them
this way.

Any publisher of a message writes its reference, so each rule holds for every payload that
`blobs.put` stores and limits the work that a false reference causes: chunks have one size between
`MIN_CHUNK_BYTES` and `MAX_CHUNK_BYTES` (the last may be smaller), so the size limits how many there
are and in how many runs; no chunk is named twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shared.transport.base import BadReference, StoredMessage
from shared.transport.seal import SEAL_BYTES

BLOB_HEADER = "Swarm-Blob"
MAX_CHUNK_BYTES = 960 * 1024
"""Measured with batched direct get: larger chunks are no faster, smaller ones cost more messages.
"""
MIN_CHUNK_BYTES = 32 * 1024
"""Smallest chunk except the last one: what fits under a server's `max_payload` of 48 KiB."""
MAX_CHUNKS = 4096
"""Most chunks of any payload."""
UNKNOWN_SIZE = 2**62
"""Size of a payload whose message does not state it; above every limit."""
_RUN = "[0-9]{1,18}(?:-[0-9]{1,18})?"
_FORM = re.compile(f"([0-9]{{1,18}}) ([0-9a-f]{{64}}) ({_RUN}(?:,{_RUN})*)(?: ([0-9a-f]{{{2 * SEAL_BYTES}}}))?")
_SEAL_LETTERS = 1 + 2 * SEAL_BYTES
_RUN_LETTERS = 40


def most_chunks(size_bytes: int) -> int:
    """Largest number of chunks of a payload of this size."""
    return min(MAX_CHUNKS, max(1, -(-size_bytes // MIN_CHUNK_BYTES)))


@dataclass(frozen=True, slots=True)
class Reference:
    """A blob's size, its SHA-256 in hex, the sequences of its chunks in order, and their seal
    (empty: none).
    """

    size_bytes: int
    sha256: str
    chunks: tuple[int, ...]
    seal: bytes = b""

    def header(self) -> str:
        """The reference as a header value."""
        listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.runs())
        return f"{self.size_bytes} {self.sha256} {listed}" + (f" {self.seal.hex()}" if self.seal else "")

    def runs(self) -> Iterator[tuple[int, int]]:
        """The chunks as (first, last) of contiguous sequences, in order."""
        return _runs(self.chunks)

    @classmethod
    def parse(cls, header: str) -> Reference:
        """Inverse of `header`. Takes time limited by the stated size. Raises BadReference for
        anything that no honest publisher writes.
        """
        try:
            size, sha256, runs, seal = _fields(header)
            chunks = tuple(_expand(runs, most_chunks(size)))
        except ValueError as error:
            raise BadReference(f"malformed blob reference {header[:100]!r}: {error}: the message cannot be read") from None
        return cls(size, sha256, chunks, seal)


def reference_of(message: StoredMessage) -> Reference | None:
    """The reference that a message carries, or None if it has none. Raises BadReference."""
    header = message.headers.get(BLOB_HEADER)
    return None if header is None else Reference.parse(header)


def size_of(headers: Mapping[str, str], inline: bytes) -> int:
    """Payload size that a message claims: the blob's if it refers to one. `UNKNOWN_SIZE` for a
    malformed reference.
    """
    header = headers.get(BLOB_HEADER)
    if header is None:
        return len(inline)
    size = header[:19].split(" ", 1)[0]
    return int(size) if size.isascii() and size.isdigit() and len(size) < 19 else UNKNOWN_SIZE


def _fields(header: str) -> tuple[int, str, str, bytes]:
    size = header[:19].split(" ", 1)[0]
    chunks = most_chunks(int(size) if size.isascii() and size.isdigit() else 0)
    most_letters = len(size) + 66 + _RUN_LETTERS * chunks + _SEAL_LETTERS
    if len(header) > most_letters:
        raise ValueError(f"{len(header)} letters, at most {most_letters} for its size")
    fields = _FORM.fullmatch(header)
    if fields is None:
        raise ValueError("it is not `size sha256 runs seal`")
    return int(fields[1]), fields[2], fields[3], bytes.fromhex(fields[4] or "")


def _runs(sequences: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = previous = sequences[0]
    for seq in sequences[1:]:
        if seq != previous + 1:
            yield start, previous
            start = seq
        previous = seq
    yield start, previous


def _expand(runs: str, most: int) -> list[int]:
    chunks: list[int] = []
    for run in runs.split(","):
        first, _, last = run.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 < begin <= end:
            raise ValueError(f"chunks {run} are out of range")
        if len(chunks) + end - begin + 1 > most:
            raise ValueError(f"more chunks than its size allows ({most} of at least {MIN_CHUNK_BYTES} bytes)")
        chunks += range(begin, end + 1)
    if len(set(chunks)) < len(chunks):
        raise ValueError("a chunk is named twice")
    return chunks

"""The reference that a message carries instead of a payload too large for it, and what may be
believed of it unread. Pure.

    Swarm-Blob: <size in bytes> <sha256> <sequences of the chunks, as runs: 12-40,45> <seal>

Chunks can be read before the message that refers to them is stored. They are sealed
(`shared.transport.seal`), and what opens them travels in the reference, so that nobody reads a
payload before it has its place in the stream. Without a seal they lie open, as earlier versions
stored them.

Whoever may publish a message writes its reference, so each rule holds for every payload that
`blobs.put` stores and bounds what a reader does for a lie: chunks have one size between
`MIN_CHUNK_BYTES` and `MAX_CHUNK_BYTES` (the last may be smaller), so the size bounds how many there
are and in how many runs; none is named twice.
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
"""Smallest chunk but the last one: what fits under a server's `max_payload` of 48 KiB."""
MAX_CHUNKS = 4096
"""In any payload."""
UNKNOWN_SIZE = 2**62
"""Size of a payload whose message does not say: above every limit."""
_RUN = "[0-9]{1,18}(?:-[0-9]{1,18})?"
_FORM = re.compile(f"([0-9]{{1,18}}) ([0-9a-f]{{64}}) ({_RUN}(?:,{_RUN})*)(?: ([0-9a-f]{{{2 * SEAL_BYTES}}}))?")
_SEAL_LETTERS = 1 + 2 * SEAL_BYTES
_RUN_LETTERS = 40


def most_chunks(size_bytes: int) -> int:
    """The most chunks that a payload of this size can lie in."""
    return min(MAX_CHUNKS, max(1, -(-size_bytes // MIN_CHUNK_BYTES)))


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a blob lies: its size, its SHA-256 in hex, the sequences of its chunks in order, and
    their seal (empty: none).
    """

    size_bytes: int
    sha256: str
    chunks: tuple[int, ...]
    seal: bytes = b""

    def header(self) -> str:
        """As it stands in the header."""
        listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.runs())
        return f"{self.size_bytes} {self.sha256} {listed}" + (f" {self.seal.hex()}" if self.seal else "")

    def runs(self) -> Iterator[tuple[int, int]]:
        """The chunks as (first, last) of contiguous sequences, in order."""
        return _runs(self.chunks)

    @classmethod
    def parse(cls, header: str) -> Reference:
        """Inverse of `header`, in time that the stated size bounds. Raises BadReference for what no
        publisher of ours writes.
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
    """Payload size of a message as it claims: of the blob if it refers to one. `UNKNOWN_SIZE` for a
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

"""Claim checks: a payload too large for one message is stored in chunks in a companion stream, and
the message only refers to it.

The reference is in a header, so a reader knows the size before it fetches anything:

    Swarm-Blob: <size in bytes> <sha256> <sequences of the chunks, as runs: 12-40,45> <seal>

The publisher stores the chunks first, so that a stored message never refers to chunks that were not
stored. They are encrypted with ChaCha20-Poly1305 (RFC 8439) and a separate key for each payload, so
the nonce may be constant; the seal, in the reference, is key and authenticator. So nobody reads a
payload before its message has its position; those who read the stream afterwards can. Chunks whose
message never arrived (the publisher was killed in between) are removed by `sweep_before`.

A foreign reference is a claim, so each of its rules holds for every payload that `put` stores and
limits the work that a false one causes: chunks have one size between `MIN_CHUNK_BYTES` and
`MAX_CHUNK_BYTES` (the last may be smaller), so the size limits how many there are and in how many
runs; no chunk is named twice. Fetching costs at most the stated size and one chunk, within one
deadline for the whole, and only chunks stored under the message's own subject count: nobody can
make others read what a third party published.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from nacl.bindings import (
    crypto_aead_chacha20poly1305_ietf_ABYTES,
    crypto_aead_chacha20poly1305_ietf_decrypt,
    crypto_aead_chacha20poly1305_ietf_encrypt,
    crypto_aead_chacha20poly1305_ietf_KEYBYTES,
    crypto_aead_chacha20poly1305_ietf_NPUBBYTES,
)
from nacl.exceptions import CryptoError
from nacl.utils import random

from shared.transport.base import BadReference, NotConnected, Retention, StoredMessage, StreamSpec, TransportError

_KEY_BYTES: int = crypto_aead_chacha20poly1305_ietf_KEYBYTES
_TAG_BYTES: int = crypto_aead_chacha20poly1305_ietf_ABYTES
_NONCE = bytes(crypto_aead_chacha20poly1305_ietf_NPUBBYTES)
SEAL_BYTES = _KEY_BYTES + _TAG_BYTES


def sealed(payload: bytes) -> tuple[bytes, bytes]:
    """The bytes to store, as many as the payload has, and the seal that decrypts them."""
    key = random(_KEY_BYTES)
    box = crypto_aead_chacha20poly1305_ietf_encrypt(payload, None, _NONCE, key)
    return box[:-_TAG_BYTES], key + box[-_TAG_BYTES:]


def opened(stored: bytes, seal: bytes) -> bytes | None:
    """The decrypted payload; None if the seal, of `SEAL_BYTES`, does not belong to these bytes."""
    try:
        return crypto_aead_chacha20poly1305_ietf_decrypt(stored + seal[_KEY_BYTES:], None, _NONCE, seal[:_KEY_BYTES])
    except CryptoError:
        return None


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
_FORM = re.compile(f"([0-9]{{1,18}}) ([0-9a-f]{{64}}) ({_RUN}(?:,{_RUN})*) ([0-9a-f]{{{2 * SEAL_BYTES}}})")
_SEAL_LETTERS = 1 + 2 * SEAL_BYTES
_RUN_LETTERS = 40


def most_chunks(size_bytes: int) -> int:
    """Largest number of chunks of a payload of this size."""
    return min(MAX_CHUNKS, max(1, -(-size_bytes // MIN_CHUNK_BYTES)))


@dataclass(frozen=True, slots=True)
class Reference:
    """A blob's size, its SHA-256 in hex, the sequences of its chunks in order, and their seal."""

    size_bytes: int
    sha256: str
    chunks: tuple[int, ...]
    seal: bytes

    def header(self) -> str:
        listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.runs())
        return f"{self.size_bytes} {self.sha256} {listed} {self.seal.hex()}"

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
    return int(fields[1]), fields[2], fields[3], bytes.fromhex(fields[4])


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


HEADER_ROOM_BYTES = 4096
"""Room for a message's headers in addition to its payload, because streams and servers limit the
sum of both.
"""
ORPHAN_AGE_S = 600.0
"""A chunk that is this much older than the oldest message of its stream belongs to no message that
is kept.
"""
_COMPANION = "_BLOBS"
_NO_COMPANION_BYTES = 512 * 1024
_PARALLEL = 8
_SHORTEST_FETCH_S = 5.0
_LONGEST_FETCH_S = 120.0
_SLOW_LINE_BYTES_PER_S = 1_000_000


def companion_name(stream: str) -> str:
    """Name of the stream that holds the chunks of `stream`."""
    return stream + _COMPANION


def companion_subject(subject: str) -> str:
    """Subject of the chunks of messages on `subject`. A publisher on one must be allowed to publish
    on the other.
    """
    return f"blob.{subject}"


def companion(spec: StreamSpec) -> StreamSpec | None:
    """The companion stream of `spec`, with the same limits; None if its payloads are too small ever
    to need one, or if it is such a stream itself.
    """
    if spec.name.endswith(_COMPANION):
        return None
    if 0 <= spec.max_msg_bytes <= _NO_COMPANION_BYTES:
        return None
    return replace(
        spec,
        name=companion_name(spec.name),
        subjects=tuple(companion_subject(subject) for subject in spec.subjects),
        retention=Retention.LIMITS,
        max_msgs=-1,
        max_msgs_per_subject=-1,
        max_msg_bytes=MAX_CHUNK_BYTES,
        description=f"Chunks of large payloads of {spec.name}",
    )


class ChunkStore(Protocol):
    """The operations on streams of chunks that storing and fetching blobs needs."""

    async def put_chunk(self, subject: str, chunk: bytes, *, stream: str, timeout_s: float) -> int: ...

    async def read(
        self, stream: str, start_seq: int, max_messages: int, timeout_s: float, *, max_bytes: int
    ) -> list[StoredMessage]:
        """Chunks at or after `start_seq` in order. Ends early with the chunk that reaches
        `max_bytes`, or with what has arrived after `timeout_s`.
        """
        ...

    async def drop(self, stream: str, seq: int) -> None: ...


async def put(store: ChunkStore, subject: str, payload: bytes, *, stream: str, chunk_bytes: int, timeout_s: float) -> Reference:
    """Store `payload` in sealed chunks. Chunks of a failed attempt are dropped. Raises what
    `put_chunk` raises.
    """
    size = min(chunk_bytes, MAX_CHUNK_BYTES)
    if size < MIN_CHUNK_BYTES:
        raise TransportError(
            f"the server's max_payload leaves {size} bytes for a chunk of a large payload, but readers require "
            f"{MIN_CHUNK_BYTES} or more: "
            "raise max_payload in its configuration (the server's default is 1MB)"
        )
    sha256, (hidden, seal) = await asyncio.to_thread(lambda: (hashlib.sha256(payload).hexdigest(), sealed(payload)))
    chunks = [hidden[start : start + size] for start in range(0, len(payload), size)]
    slots = asyncio.Semaphore(_PARALLEL)

    async def one(chunk: bytes) -> int:
        async with slots:
            return await store.put_chunk(companion_subject(subject), chunk, stream=companion_name(stream), timeout_s=timeout_s)

    stored = await asyncio.gather(*(one(chunk) for chunk in chunks), return_exceptions=True)
    failures = [outcome for outcome in stored if isinstance(outcome, BaseException)]
    sequences = [outcome for outcome in stored if isinstance(outcome, int)]
    if failures:
        await drop(store, stream, sequences)
        raise failures[0]
    return Reference(len(payload), sha256, tuple(sequences), seal)


async def payload(store: ChunkStore, message: StoredMessage) -> bytes:
    """The payload of `message`: its own bytes, or the blob that it refers to. Raises the errors of
    `fetch`; the deadline grows with the stated size.
    """
    if message.inline is not None:
        return message.inline
    reference = reference_of(message)
    if reference is None:
        raise TransportError(f"message {message.seq} of {message.stream} has neither a payload nor a reference to one")
    timeout_s = min(_SHORTEST_FETCH_S + reference.size_bytes / _SLOW_LINE_BYTES_PER_S, _LONGEST_FETCH_S)
    return await fetch(store, message, reference, timeout_s=timeout_s)


async def fetch(store: ChunkStore, message: StoredMessage, reference: Reference, *, timeout_s: float) -> bytes:
    """Assemble and check the blob of `message`.

    Raises:
        BadReference: the chunks are not what an honest publisher stores for this message: wrong
            subject or size.
        NotConnected: not all chunks arrived within `timeout_s`, which applies to the whole blob.
        TransportError: a chunk is missing or the bytes differ.
    """
    name = companion_name(message.stream)
    try:
        async with asyncio.timeout(timeout_s):
            parts = await _chunks(store, name, companion_subject(message.subject), reference, timeout_s)
            payload, found = await asyncio.to_thread(_assembled, parts, reference.seal)
    except TimeoutError:
        raise NotConnected(f"blob in {name}: its {reference.size_bytes} bytes did not arrive within {timeout_s:g} s") from None
    if found != reference.sha256:
        raise TransportError(
            f"blob in {name}: expected {reference.size_bytes} bytes with sha256 {reference.sha256[:8]}.., "
            f"found {len(payload)} with {found[:8]}..: the message cannot be used"
        )
    return payload


async def _chunks(store: ChunkStore, name: str, subject: str, reference: Reference, timeout_s: float) -> list[bytes]:
    """The chunks in order, and only those under this message's own subject: a reference is its
    sender's claim and could name another publisher's chunks. `left` limits the size of one answer
    of the server, so that a false size costs no memory.
    """
    parts: list[bytes] = []
    left = reference.size_bytes
    for first, last in reference.runs():
        expected = first
        while expected <= last:
            messages = await store.read(name, expected, last - expected + 1, timeout_s, max_bytes=max(1, left))
            if not messages:
                raise _gone(name, expected)
            for message in messages:
                if message.seq != expected or message.inline is None:
                    raise _gone(name, expected)
                if message.subject != subject:
                    raise BadReference(
                        f"blob in {name}: chunk {expected} is stored under {message.subject}, not {subject}: refused"
                    )
                parts.append(message.inline)
                left -= len(message.inline)
                _check_size(name, parts, reference, left)
                expected += 1
    return parts


def _assembled(parts: Sequence[bytes], seal: bytes) -> tuple[bytes, str]:
    """The payload, or the stored bytes if they cannot be decrypted, and its SHA-256."""
    stored = b"".join(parts)
    payload = opened(stored, seal) or stored
    return payload, hashlib.sha256(payload).hexdigest()


def _check_size(name: str, parts: Sequence[bytes], reference: Reference, left: int) -> None:
    """Refuse a blob at the first chunk that shows that the stated size is wrong, before the next
    one is read.
    """
    size, first = len(parts[-1]), len(parts[0])
    of = f"blob in {name}: chunk {len(parts)} of {len(reference.chunks)} has {size} bytes"
    if left < 0:
        raise BadReference(f"{of}: it is larger than its stated {reference.size_bytes} bytes: refused")
    if len(parts) == len(reference.chunks):
        if left:
            raise BadReference(f"{of}, {left} fewer than expected of {reference.size_bytes}: refused")
    elif not MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES or size != first or not left:
        raise BadReference(f"{of}; all but the last have one size from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}: refused")


async def drop(store: ChunkStore, stream: str, chunks: Sequence[int]) -> None:
    """Delete chunks, as far as the server allows it; the rest is bounded by the companion stream's
    limits.
    """
    await asyncio.gather(*(store.drop(companion_name(stream), seq) for seq in chunks), return_exceptions=True)


async def drop_of(store: ChunkStore, message: StoredMessage) -> None:
    """Delete the chunks of a deleted message, if it had any."""
    if message.inline is None:
        with suppress(TransportError):
            reference = reference_of(message)
            await drop(store, message.stream, reference.chunks if reference else ())


def sweep_before(oldest_message_at: float | None, now: float) -> float:
    """The time before which stored chunks belong to no kept message. `oldest_message_at` is None
    for an empty stream.
    """
    return (now if oldest_message_at is None else oldest_message_at) - ORPHAN_AGE_S


def _gone(name: str, seq: int) -> TransportError:
    return TransportError(f"blob in {name}: chunk {seq} is gone (the stream's limits passed it): the message cannot be used")

"""`nats://`: policies as chunks in a stream of the node plane, for trainers and generators without
a shared volume.

Each chunk is one message whose headers name its publication and its position in it. The pointer's
uri names the first and last position of the chunks:
`nats://<stream>/<publication>?first=12&last=139`. They are read by batched direct get of positions,
in parallel with hashing and writing (nats-py's object store took 40 times as long).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from shared.atomic_files import draft_in
from shared.cancelling import cancel_and_wait
from shared.contracts.codec import decode
from shared.contracts.control import PolicyFile, PolicyPointer
from shared.contracts.streams import look_for_streams
from shared.contracts.subjects import POLICY_KEY, node_bucket, node_policies, node_policies_stream
from shared.contracts.wire import MessageError
from shared.policy_store.base import PolicyStoreError, StoredPolicy, StorePlace, policy_label, wrong_hash, wrong_size
from shared.policy_store.chain import ChainStore
from shared.policy_store.files import cause_of, remove_old_downloads, sha256_of
from shared.transport.base import Lowering, StoredMessage, StreamSpec, Transport, TransportError

CHUNK_BYTES = 512 * 1024
_MESSAGES_PER_READ = 16
_READS_AT_ONCE = 2
_PUBLISHES_AT_ONCE = 8
_TIMEOUT_S = 30.0
_ANCHOR_EVERY = 16
"""Default: a reader that joins fetches at most 15 deltas."""
_PUBLICATION = "Swarm-Policy"
_INDEX = "Swarm-Chunk"
_URI = re.compile(r"nats://([A-Za-z0-9_-]+)/([0-9a-f]+)\?first=(\d{1,18})&last=(\d{1,18})")


def policies_stream(node: str, *, replicas: int = 1) -> StreamSpec:
    """The stream of a node's policies."""
    return StreamSpec(
        name=node_policies_stream(node),
        subjects=(node_policies(node),),
        max_msg_bytes=CHUNK_BYTES,
        replicas=replicas,
        description=f"Policies of {node} in chunks",
    )


async def prepare_policies_stream(
    transport: Transport, node: str, *, create: bool, replicas: int = 1, lowering: Lowering = Lowering.KEEP
) -> None:
    """Create the stream of policies, or with `create=False` only check that it exists. Raises
    MissingStreams.
    """
    if create:
        await transport.ensure_stream(policies_stream(node, replicas=replicas), lowering)
    else:
        await look_for_streams(transport, [node_policies_stream(node)], "swarm nats init --plane node")


class JetStreamStore:
    """See `PolicyStore`."""

    def __init__(self, transport: Transport, node: str, replicas: int = 1, *, create: bool = True) -> None:
        """`create`: create the stream if it is missing. False: the operator creates it, and an
        error says so if it is missing.
        """
        self._transport = transport
        self._node = node
        self._stream = node_policies_stream(node)
        self._chunks = node_policies(node)
        self._replicas = replicas
        self._create = create
        self._ensured = False
        self._first: dict[int, int] = {}
        """Position of the first chunk of each version that this process published and keeps."""

    async def publish(self, weights_file: Path, version: int) -> StoredPolicy:
        """Publish the chunks; see `PolicyStore.publish`."""
        label = policy_label(self._node, version)
        publication = secrets.token_hex(8)
        try:
            await self._ensure_stream()
            size_bytes, sha256, positions = await self._send(weights_file, publication)
            self._first[version] = min(positions)
        except OSError as error:
            raise PolicyStoreError(f"{label}: not published: {error}: was {weights_file} deleted while being published?") from error
        except TransportError as error:
            raise PolicyStoreError(
                f"{label}: not published: {error}: the old policy stays until the server accepts this one"
            ) from error
        return StoredPolicy(sha256, size_bytes, f"nats://{self._stream}/{publication}?first={min(positions)}&last={max(positions)}")

    def begin_again(self) -> None:
        """Nothing to do: every policy in this store is a full copy."""

    async def fetch(self, pointer: PolicyPointer | PolicyFile, into: Path) -> Path:
        """Download to `into/<sha256>.safetensors`, unless it is already there. Older downloads
        there are deleted, except one.
        """
        label = policy_label(self._node, pointer.version)
        match = _URI.fullmatch(pointer.uri)
        if match is None or match[1] != self._stream:
            raise PolicyStoreError(
                f"{label}: its uri {pointer.uri} is not in {self._stream}: use the same policy_store.uri for trainer and generator"
            )
        target = into / f"{pointer.sha256}.safetensors"
        try:
            if target.exists() and await asyncio.to_thread(sha256_of, target) == pointer.sha256:
                return target
            await self._download(pointer, match[2], int(match[3]), int(match[4]), target, label)
            await asyncio.to_thread(remove_old_downloads, into, target)
        except OSError as error:
            raise PolicyStoreError(f"{label}: not downloaded: {cause_of(error, into)}") from error
        except TransportError as error:
            raise PolicyStoreError(f"{label}: not downloaded: {error}: the old policy stays; a retry is enough") from error
        return target

    async def prune(self, keep: Collection[int]) -> None:
        """Delete everything before the oldest policy that is needed: of those in `keep`, as far as
        this process has published them, and of those that the announced one is built from.
        """
        try:
            announced = await self._announced()
            first = [position for version, position in self._first.items() if version in keep]
            first += [int(match[3]) for uri in announced if (match := _URI.fullmatch(uri))]
            if first:
                await self._transport.purge(self._stream, min(first) - 1)
        except (TransportError, MessageError) as error:
            raise PolicyStoreError(f"old policies of {self._node} not pruned: {error}: the next prune will") from error
        self._first = {version: position for version, position in self._first.items() if version in keep}

    async def _announced(self) -> tuple[str, ...]:
        """The uris of the announced policy and of its anchor; none before the first."""
        entry = await self._transport.kv.get(node_bucket(self._node), POLICY_KEY)
        if entry is None:
            return ()
        pointer = decode(entry.value, PolicyPointer)
        return (pointer.uri, pointer.anchor.uri) if pointer.anchor is not None else (pointer.uri,)

    async def _ensure_stream(self) -> None:
        if not self._ensured:
            await prepare_policies_stream(self._transport, self._node, create=self._create, replicas=self._replicas)
            self._ensured = True

    async def _send(self, weights_file: Path, publication: str) -> tuple[int, str, list[int]]:
        """Publish all chunks; returns size, sha256 and the positions in no particular order."""
        digest, size_bytes, index = hashlib.sha256(), 0, 0
        sending: set[asyncio.Task[int]] = set()
        positions: list[int] = []
        with weights_file.open("rb", buffering=0) as source:  # noqa: ASYNC230 (read in a thread below)
            try:
                while True:
                    chunk = await asyncio.to_thread(_read_hashing, source, digest)
                    if not chunk and index:
                        break
                    sending.add(asyncio.create_task(self._send_chunk(publication, index, chunk)))
                    size_bytes, index = size_bytes + len(chunk), index + 1
                    if len(sending) >= _PUBLISHES_AT_ONCE:
                        done, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                        positions += [task.result() for task in done]
                positions += await asyncio.gather(*sending)
            finally:
                await cancel_and_wait(*sending)
        return size_bytes, digest.hexdigest(), positions

    async def _send_chunk(self, publication: str, index: int, chunk: bytes) -> int:
        # The id contains a number unique to this publication, so that the same bytes published
        # twice are stored and pruned separately.
        message_id = f"{publication}-{index}"
        headers = {_PUBLICATION: publication, _INDEX: str(index)}
        ack = await self._transport.publish(
            self._chunks, chunk, stream=self._stream, message_id=message_id, headers=headers, timeout_s=_TIMEOUT_S
        )
        return ack.seq

    async def _download(
        self, pointer: PolicyPointer | PolicyFile, publication: str, first: int, last: int, target: Path, label: str
    ) -> None:
        download = _Download(pointer.size_bytes)
        with draft_in(target.parent) as (stream, draft):
            async for messages in self._windows(first, last):
                wanted = [message for message in messages if message.headers.get(_PUBLICATION) == publication]
                await asyncio.to_thread(download.take, wanted, stream)
            if download.size_bytes != pointer.size_bytes:
                raise wrong_size(label, self._stream, pointer.size_bytes, download.size_bytes)
            found = download.digest.hexdigest()
            if found != pointer.sha256:
                raise wrong_hash(label, self._stream, pointer.sha256, found)
            os.replace(draft, target)  # not synced: after a power cut the hash check fails, and it is fetched again

    async def _windows(self, first: int, last: int) -> AsyncIterator[list[StoredMessage]]:
        """Messages at `first..last` in order, a few at a time; the next ones are requested
        meanwhile.
        """
        starts = iter(range(first, last + 1, _MESSAGES_PER_READ))
        reads: deque[asyncio.Task[list[StoredMessage]]] = deque()
        try:
            while True:
                while len(reads) < _READS_AT_ONCE and (start := next(starts, None)) is not None:
                    reads.append(asyncio.create_task(self._window(start, min(start + _MESSAGES_PER_READ - 1, last))))
                if not reads:
                    return
                yield await reads.popleft()
        finally:
            await cancel_and_wait(*reads)

    async def _window(self, first: int, last: int) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        while first <= last:
            messages = await self._transport.read(self._stream, first, last - first + 1, _TIMEOUT_S)
            found += [message for message in messages if message.seq <= last]
            if not messages or messages[-1].seq >= last:
                break
            first = messages[-1].seq + 1
        return found


class _Download:
    """Puts chunks in order, hashes and writes them. Chunks may be a few positions out of order,
    because they were published in parallel.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.digest = hashlib.sha256()
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._early: dict[int, bytes] = {}
        self._next = 0

    def take(self, messages: list[StoredMessage], stream: BinaryIO) -> None:
        for message in messages:
            self._early[int(message.headers[_INDEX])] = message.inline or b""
        while (chunk := self._early.pop(self._next, None)) is not None and self.size_bytes <= self._limit_bytes:
            self.digest.update(chunk)
            stream.write(chunk)
            self.size_bytes += len(chunk)
            self._next += 1


def _read_hashing(source: BinaryIO, digest: hashlib._Hash) -> bytes:
    chunk = source.read(CHUNK_BYTES)
    digest.update(chunk)
    return chunk


def open_store(place: StorePlace) -> ChainStore:
    """The store that a `nats://` uri names."""
    remedy = "set policy_store.uri to file:///folder or nats://"
    parts = urlsplit(place.uri)
    if parts.netloc or parts.path.strip("/"):
        raise PolicyStoreError(f"policy store {place.uri}: policies use nats.node_url, so the URI must not name a server: {remedy}")
    if place.transport is None:
        raise PolicyStoreError(f"policy store {place.uri}: not connected to the node plane: {remedy}")
    store = JetStreamStore(place.transport, place.node, place.replicas, create=place.create)
    return ChainStore(store, place.node, place.scratch, place.anchor_every or _ANCHOR_EVERY)

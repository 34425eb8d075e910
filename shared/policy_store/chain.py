"""Stores occasional full copies of the policy (anchors) and the deltas from one policy to the next
in between, over any policy store.

A pointer names its anchor and all deltas since, so a reader needs nothing else. It starts with the
newest policy of the chain that it still has, or fetches the anchor; it applies the remaining
deltas, and uses the result only if its sha256 is the pointer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from shared.atomic_files import draft_in, remove_abandoned_drafts
from shared.contracts.control import PolicyDelta, PolicyFile, PolicyPointer
from shared.policy_store.base import PolicyDamagedError, PolicyStore, PolicyStoreError, StoredPolicy, policy_label
from shared.policy_store.files import cause_of, remove_old_downloads, sha256_of

# A compact delta between two weight files: the XOR of their bytes, stored for changed elements
# only or as byte planes, compressed with zstd.
#
# magic, length of the header (4 bytes, little-endian), header (MessagePack), payloads of blocks
#
# Both files are safetensors with the same names, shapes and dtypes, so their headers are
# identical and every element is at the same position. A tensor is split into blocks of at most
# `_BLOCK` elements; a block without a change is omitted. Applying is exact, and deltas compose:
# all deltas of a chain, applied to its first file, give the last one. A delta applied twice
# cancels itself. Whoever applies one must therefore check the sha256 of the result.
#
# One step at learning rate 1e-6 in bfloat16 changes one or two weights of a hundred. A block then
# stores the distance from one changed element to the next (one byte each, 255 for "none within
# 255") and the XOR of each. A block with more changes stores the XOR of every element, first all
# lowest bytes, then all next ones. This is smaller than storing element by element, because the
# highest bytes hardly change.

Bytes = NDArray[np.uint8]

_MAGIC = b"swarm-delta-1\n"
_BLOCK = 1 << 22
"""Elements per block: 8 MiB of bfloat16, so that a few threads use little memory."""
_SPARSE = 0.3
"""Up to this fraction of changed elements, gaps are smaller than planes (measured on SmolLM2 in
bfloat16).
"""
_ZSTD_LEVEL = 1
_LONGEST_HEADER = 64 << 20
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class DeltaError(ValueError):
    """There is no delta between these files, or this delta cannot be applied; the message says
    why.
    """


class _Block(msgspec.Struct, frozen=True, array_like=True):
    """`elements` elements of `width` bytes from offset `offset` of the file; payloads of `lengths`
    bytes.
    """

    offset: int
    elements: int
    width: int
    how: Literal["gaps", "planes"]
    lengths: list[int]


class DeltaInfo(msgspec.Struct, frozen=True):
    """The header of a delta. base, makes: the sha256 of the file that it applies to and of the file
    that it makes, of `size_bytes`.
    """

    base: str
    makes: str
    size_bytes: int
    blocks: list[_Block]


def write_delta(base: Path, base_sha256: str, target: Path, file: Path) -> DeltaInfo:
    """Write the delta from `base` to `target` into `file`.

    Args:
        base_sha256: Hash of `base`, which is not computed again.

    Raises:
        DeltaError: these are not two safetensors files with the same tensors.
        OSError: one of them cannot be read, or `file` cannot be written.
    """
    old, new = _mapped(base), _mapped(target)
    start, tensors = _layout(new)
    if old.size != new.size or not np.array_equal(old[:start], new[:start]):
        raise DeltaError(f"{target.name} has different tensors from {base.name}: no delta is possible")
    with ThreadPoolExecutor() as pool:
        digest = pool.submit(lambda: hashlib.sha256(new.data).hexdigest())
        parts = [pool.submit(_packed, old, new, *block) for block in _cut(tensors)]
        packed = [found for part in parts if (found := part.result()) is not None]
        header = DeltaInfo(
            base=base_sha256,
            makes=digest.result(),
            size_bytes=new.size,
            blocks=[block for block, _ in packed],
        )
    head = msgspec.msgpack.encode(header)
    with file.open("wb") as stream:
        stream.write(_MAGIC + len(head).to_bytes(4, "little") + head)
        for _, payloads in packed:
            stream.writelines(payloads)
    return header


class Delta:
    """A delta file that has been read. The caller must check where its bytes come from, but damage
    is always detected.
    """

    def __init__(self, contents: bytes) -> None:
        """Raises DeltaError if it is truncated or not a delta."""
        start = len(_MAGIC) + 4
        length = int.from_bytes(contents[len(_MAGIC) : start], "little")
        if not contents.startswith(_MAGIC) or len(contents) < start + length:
            raise DeltaError("no delta, or torn")
        try:
            self._header = msgspec.msgpack.decode(contents[start : start + length], type=DeltaInfo)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DeltaError(f"a delta with an unreadable header ({error})") from None
        self._payload = memoryview(contents)[start + length :]
        if sum(sum(block.lengths) for block in self._header.blocks) != len(self._payload):
            raise DeltaError("a torn delta")

    @property
    def info(self) -> DeltaInfo:
        return self._header

    def apply(self, contents: Bytes) -> None:
        """Change `contents`, (size_bytes,) uint8, from the base to what the delta makes. Other
        contents become meaningless.

        Raises:
            DeltaError: the delta does not fit or is damaged; `contents` is then unusable.
        """
        if contents.size != self._header.size_bytes:
            raise DeltaError(f"a delta for {self._header.size_bytes} bytes, not {contents.size}")
        position, work = 0, []
        with ThreadPoolExecutor() as pool:
            for block in self._header.blocks:
                payloads = []
                for length in block.lengths:
                    payloads.append(self._payload[position : position + length])
                    position += length
                work.append(pool.submit(_unpack_into, contents, block, payloads))
            for done in work:
                done.result()


def _mapped(file: Path) -> Bytes:
    with file.open("rb") as stream:
        try:
            return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except ValueError:
            raise DeltaError(f"{file.name} is empty") from None


def _layout(contents: Bytes) -> tuple[int, list[tuple[int, int, int]]]:
    """The offset at which the data of a safetensors file begins; and offset in the file, bytes and
    element width of each tensor.
    """
    length = int.from_bytes(contents[:8].tobytes(), "little")
    if contents.size < 8 or not 0 < length <= min(_LONGEST_HEADER, contents.size - 8):
        raise DeltaError("no safetensors file")
    start = 8 + length
    try:
        entries: dict[str, Any] = json.loads(contents[8:start].tobytes())
        tensors = [
            (start + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0], _WIDTHS.get(entry["dtype"], 1))
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise DeltaError("no safetensors file") from None
    if any(offset < start or size < 0 or offset + size > contents.size or size % width for offset, size, width in tensors):
        raise DeltaError("no safetensors file")
    if sum(size for _, size, _ in tensors) != contents.size - start:
        raise DeltaError("a safetensors file with bytes of no tensor")
    return start, tensors


def _cut(tensors: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    for offset, size, width in tensors:
        elements = size // width
        for first in range(0, elements, _BLOCK):
            yield offset + first * width, min(_BLOCK, elements - first), width


def _packed(old: Bytes, new: Bytes, offset: int, elements: int, width: int) -> tuple[_Block, list[bytes]] | None:
    """A block and its payloads; None if nothing changed."""
    here = slice(offset, offset + elements * width)
    if np.array_equal(old[here], new[here]):
        return None
    changes = (old[here] ^ new[here]).reshape(elements, width)
    changed = np.flatnonzero(changes.view(f"<u{width}")[:, 0] if width > 1 else changes[:, 0])
    press = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress
    how: Literal["gaps", "planes"] = "gaps" if changed.size <= _SPARSE * elements else "planes"
    payloads = [press(_gaps(changed).tobytes())] if how == "gaps" else []
    values = changes[changed] if how == "gaps" else changes
    payloads += [press(values[:, byte].tobytes()) for byte in range(width)]
    return _Block(offset, elements, width, how, [len(payload) for payload in payloads]), payloads


def _gaps(positions: NDArray[np.intp]) -> Bytes:
    """Increasing positions as bytes: a byte below 255 skips that many elements and names the next;
    255 skips 255 and names none.
    """
    skipped = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(skipped // 255 + 1)
    steps = np.full(int(ends[-1]), 255, np.uint8)
    steps[ends - 1] = skipped % 255
    return steps


def _positions(steps: Bytes) -> NDArray[np.int64]:
    """Inverse of `_gaps`."""
    names = steps < 255
    return (np.cumsum(steps.astype(np.int64) + names) - 1)[names]


def _unpack_into(contents: Bytes, block: _Block, payloads: list[memoryview]) -> None:
    """Changes `contents` in place, which is the memory-mapped file. The delta came over the
    network, so every number in it is checked before it is used as an index. A wrong one would write
    beyond the block, or ask for gigabytes.
    """
    width, end = block.width, block.offset + block.elements * block.width
    if width not in (1, 2, 4, 8) or block.offset < 0 or not 0 < block.elements <= _BLOCK or end > contents.size:
        raise DeltaError("a damaged delta: a block outside the file")
    sparse = block.how == "gaps"
    if len(payloads) != width + sparse:
        raise DeltaError("a damaged delta: a block without all its parts")
    here = contents[block.offset : end].reshape(block.elements, width)
    if not sparse:
        for byte, plane in enumerate(payloads):
            here[:, byte] ^= _unpressed(plane, block.elements, block.elements)
        return
    positions = _positions(_unpressed(payloads[0], None, 2 * block.elements))
    if positions.size and positions[-1] >= block.elements:
        raise DeltaError("a damaged delta: a change outside its block")
    for byte, plane in enumerate(payloads[1:]):
        here[positions, byte] ^= _unpressed(plane, positions.size, positions.size)


def _unpressed(payload: memoryview, size: int | None, most: int) -> Bytes:
    """The decompressed payload, of `size` bytes (None: any number up to `most`). The limits prevent
    a payload from making this process use more memory.
    """
    try:
        said = zstandard.frame_content_size(payload)
        if not 0 <= said <= most:
            raise DeltaError("a damaged delta: a part of another size")
        found = np.frombuffer(zstandard.ZstdDecompressor().decompress(bytes(payload), max_output_size=most), np.uint8)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a damaged delta ({error})") from None
    if size is not None and found.size != size:
        raise DeltaError("a damaged delta: a part of another size")
    return found


_WORTH = 0.5
"""If a delta is larger than this part of a full copy, the full copy is published instead."""
_DELTAS = "deltas"


@dataclass(frozen=True, slots=True)
class _Link:
    """The end of the chain: the policy published last, and what a reader needs to build it."""

    file: Path
    sha256: str
    anchor: PolicyFile
    deltas: tuple[PolicyDelta, ...] = ()

    @property
    def version(self) -> int:
        return self.deltas[-1].file.version if self.deltas else self.anchor.version

    @property
    def versions(self) -> set[int]:
        return {self.anchor.version, *(delta.file.version for delta in self.deltas)}


class _WrongResult(PolicyDamagedError):
    """Undamaged deltas produced a different file than the pointer says."""


class ChainStore:
    """See `PolicyStore`. The writer keeps a copy of the policy it published last, a reader a copy
    of the one it fetched last.
    """

    def __init__(self, store: PolicyStore, node: str, scratch: Path | None = None, anchor_every: int = 1) -> None:
        """`scratch`: a folder of the writer's own; None for a reader. `anchor_every`: number of
        policies from one full copy to the next.
        """
        self._store = store
        self._node = node
        self._scratch = scratch
        self._anchor_every = anchor_every
        self._newest: _Link | None = None
        self._not_worth = 0
        """Number of policies to publish before a delta is tried again, after one that was nearly as
        large as a full copy.
        """
        self._anchors: dict[int, int] = {}
        """The version of the anchor that each version published by this process needs."""

    async def publish(self, weights_file: Path, version: int) -> StoredPolicy:
        """Publish a delta if this process published a policy before and the delta is small enough;
        otherwise a full copy, which is a new anchor.
        """
        stored = await self._publish_delta(weights_file, version)
        if stored is None:
            stored = await self._publish_anchor(weights_file, version)
        self._anchors[version] = stored.anchor.version if stored.anchor else version
        return stored

    def begin_again(self) -> None:
        """See `PolicyStore.begin_again`: the next policy is a full copy and starts a new chain."""
        self._newest, self._not_worth = None, 0

    async def fetch(self, pointer: PolicyPointer | PolicyFile, into: Path) -> Path:
        """See `PolicyStore.fetch`. A policy built from deltas is put into `into`, under the name
        that a download would have.
        """
        if isinstance(pointer, PolicyFile) or pointer.anchor is None:
            return await self._store.fetch(pointer, into)
        target = into / f"{pointer.sha256}.safetensors"
        label = policy_label(self._node, pointer.version)
        try:
            if target.exists() and await asyncio.to_thread(sha256_of, target) == pointer.sha256:
                return target
            into.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 (as short as any of its calls)
            for known in range(len(pointer.deltas) - 1, 0, -1):
                sha256 = pointer.deltas[known - 1].makes
                base = into / f"{sha256}.safetensors"
                if base.exists():
                    try:
                        return await self._make(label, pointer, base, sha256, pointer.deltas[known:], target)
                    except _WrongResult:
                        base.unlink(missing_ok=True)  # deltas are checked on arrival, so the base is damaged
                    break
            base = await self._store.fetch(pointer.anchor, into)
            return await self._make(label, pointer, base, pointer.anchor.sha256, pointer.deltas, target)
        except OSError as error:
            raise PolicyStoreError(f"{label}: not built: {cause_of(error, into)}") from error
        finally:
            await asyncio.to_thread(_tidy, into, target)

    async def prune(self, keep: Collection[int]) -> None:
        """Delete every version that no version in `keep` needs."""
        needed = set(keep)
        if self._newest is not None:
            # It may not have been announced yet, and the next policy needs it.
            needed |= self._newest.versions
        for version in keep:
            needed.update(range(self._anchors.get(version, version), version))
        await self._store.prune(needed)
        self._anchors = {version: anchor for version, anchor in self._anchors.items() if version in needed}

    async def _publish_anchor(self, weights_file: Path, version: int) -> StoredPolicy:
        link = None
        if self._scratch is not None and self._anchor_every > 1 and not self._not_worth:
            # Without the copy the next policy is also a full copy. That is no reason to fail the
            # publication of this one.
            with contextlib.suppress(OSError):
                link = await asyncio.to_thread(self._remember, weights_file)
        stored = await self._store.publish(weights_file, version)
        if link is not None:
            file = PolicyFile(version=version, sha256=stored.sha256, size_bytes=stored.size_bytes, uri=stored.uri)
            self._newest = _Link(link, stored.sha256, file, ())
        return stored

    async def _publish_delta(self, weights_file: Path, version: int) -> StoredPolicy | None:
        """None if a full copy is due or better."""
        newest, self._newest = self._newest, None
        self._not_worth = max(0, self._not_worth - 1)
        if newest is None or self._scratch is None or len(newest.deltas) + 1 >= self._anchor_every:
            return None
        if version <= newest.version:
            return None
        draft = self._scratch / "next.delta"
        try:
            info = await asyncio.to_thread(write_delta, newest.file, newest.sha256, weights_file, draft)
            if draft.stat().st_size > _WORTH * info.size_bytes:
                self._not_worth = self._anchor_every
                return None
            sent = await self._store.publish(draft, version)
            await asyncio.to_thread(self._remember, weights_file)
        except DeltaError:
            return None
        except OSError as error:
            label = policy_label(self._node, version)
            raise PolicyStoreError(f"{label}: not published: {cause_of(error, self._scratch)}") from error
        finally:
            draft.unlink(missing_ok=True)
        file = PolicyFile(version=version, sha256=sent.sha256, size_bytes=sent.size_bytes, uri=sent.uri)
        deltas = (*newest.deltas, PolicyDelta(file=file, makes=info.makes))
        self._newest = _Link(newest.file, info.makes, newest.anchor, deltas)
        return StoredPolicy(info.makes, info.size_bytes, newest.anchor.uri, newest.anchor, deltas)

    def _remember(self, weights_file: Path) -> Path:
        """Keep a copy of the policy for the next delta: a hard link if possible, because a volume
        store moves the file.
        """
        assert self._scratch is not None
        self._scratch.mkdir(parents=True, exist_ok=True)
        kept = self._scratch / "newest.safetensors"
        kept.unlink(missing_ok=True)
        try:
            os.link(weights_file, kept)
        except OSError:
            shutil.copyfile(weights_file, kept)
        return kept

    async def _make(
        self, label: str, pointer: PolicyPointer, base: Path, base_sha256: str, deltas: Sequence[PolicyDelta], target: Path
    ) -> Path:
        """Apply `deltas` to a copy of `base`. The result gets its final name only if its sha256 is
        the pointer's.
        """
        files = [await self._store.fetch(delta.file, target.parent / _DELTAS / str(delta.file.version)) for delta in deltas]
        try:
            await asyncio.to_thread(_apply, base, base_sha256, files, pointer.sha256, target)
        except DeltaError as error:
            raise _WrongResult(
                f"{label}: cannot be built from {base.name} and {len(deltas)} deltas: {error}: not loaded; a full copy "
                "is requested from the trainer"
            ) from None
        return target


def _tidy(folder: Path, newest: Path) -> None:
    """Keep the newest policy and the previous one, so that a loader that fails repeatedly does not
    fill the disk.
    """
    shutil.rmtree(folder / _DELTAS, ignore_errors=True)
    if newest.exists():
        remove_old_downloads(folder, newest)
    remove_abandoned_drafts(folder)


def _apply(base: Path, base_sha256: str, deltas: Sequence[Path], sha256: str, target: Path) -> None:
    with draft_in(target.parent) as (_, draft):
        shutil.copyfile(base, draft)
        contents = np.memmap(draft, np.uint8, "r+")
        for file in deltas:
            delta = Delta(file.read_bytes())
            if delta.info.base != base_sha256:
                raise DeltaError(f"{file.name} is for another base, {delta.info.base[:12]}.. instead of {base_sha256[:12]}..")
            delta.apply(contents)
            base_sha256 = delta.info.makes
        if (found := hashlib.sha256(contents.data).hexdigest()) != sha256:
            raise DeltaError(f"sha256 mismatch (expected {sha256[:12]}.., got {found[:12]}..)")
        os.replace(draft, target)  # not synced: after a power cut the hash check fails, and it is built again

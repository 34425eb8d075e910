"""A compact delta between two weight files: the XOR of their bytes, stored for changed elements
only or as byte planes, compressed with zstd.

    magic, length of the header (4 bytes, little-endian), header (MessagePack), payloads of blocks

Both files are safetensors with the same names, shapes and dtypes, so their headers are identical
and every element is at the same position. A tensor is split into blocks of at most `_BLOCK`
elements; a block without a change is omitted. Applying is exact, and deltas compose: all deltas of
a chain, applied to its first file, give the last one. A delta applied twice cancels itself. Whoever
applies one must therefore check the sha256 of the result; `damaged` then says which tensors are
wrong.

One step at learning rate 1e-6 in bfloat16 changes one or two weights of a hundred. A block then
stores the distance from one changed element to the next (one byte each, 255 for "none within 255")
and the XOR of each. A block with more changes stores the XOR of every element, first all lowest
bytes, then all next ones. This is smaller than storing element by element, because the highest
bytes hardly change.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

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


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    name: str
    offset: int
    size_bytes: int
    crc32: int
    """Checksum of the block's contents after applying the delta."""


class _Header(msgspec.Struct, frozen=True):
    base: str
    makes: str
    size_bytes: int
    blocks: list[_Block]
    tensors: list[_Tensor]


@dataclass(frozen=True, slots=True)
class DeltaInfo:
    """The sha256 of the file it applies to and of the file it makes, and the latter's
    `size_bytes`.
    """

    base: str
    makes: str
    size_bytes: int


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
        sums = [pool.submit(zlib.crc32, new[offset : offset + size].data) for _, offset, size, _ in tensors]
        parts = [pool.submit(_packed, old, new, *block) for block in _cut(tensors)]
        packed = [found for part in parts if (found := part.result()) is not None]
        header = _Header(
            base=base_sha256,
            makes=digest.result(),
            size_bytes=new.size,
            blocks=[block for block, _ in packed],
            tensors=[_Tensor(name, offset, size, crc.result()) for (name, offset, size, _), crc in zip(tensors, sums, strict=True)],
        )
    head = msgspec.msgpack.encode(header)
    with file.open("wb") as stream:
        stream.write(_MAGIC + len(head).to_bytes(4, "little") + head)
        for _, payloads in packed:
            stream.writelines(payloads)
    return DeltaInfo(header.base, header.makes, header.size_bytes)


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
            self._header = msgspec.msgpack.decode(contents[start : start + length], type=_Header)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DeltaError(f"a delta with an unreadable header ({error})") from None
        self._payload = memoryview(contents)[start + length :]
        if sum(sum(block.lengths) for block in self._header.blocks) != len(self._payload):
            raise DeltaError("a torn delta")

    @property
    def info(self) -> DeltaInfo:
        """What the delta applies to and makes."""
        return DeltaInfo(self._header.base, self._header.makes, self._header.size_bytes)

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

    def damaged(self, contents: Bytes) -> list[str]:
        """Names of the tensors that differ from what the delta makes."""
        return [
            tensor.name
            for tensor in self._header.tensors
            if zlib.crc32(contents[tensor.offset : tensor.offset + tensor.size_bytes].data) != tensor.crc32
        ]


def _mapped(file: Path) -> Bytes:
    with file.open("rb") as stream:
        try:
            return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except ValueError:
            raise DeltaError(f"{file.name} is empty") from None


def _layout(contents: Bytes) -> tuple[int, list[tuple[str, int, int, int]]]:
    """The offset at which the data of a safetensors file begins; and name, offset in the file,
    bytes and element width of each tensor.
    """
    length = int.from_bytes(contents[:8].tobytes(), "little")
    if contents.size < 8 or not 0 < length <= min(_LONGEST_HEADER, contents.size - 8):
        raise DeltaError("no safetensors file")
    start = 8 + length
    try:
        entries: dict[str, Any] = json.loads(contents[8:start].tobytes())
        tensors = [
            (
                name,
                start + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
                _WIDTHS.get(entry["dtype"], 1),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise DeltaError("no safetensors file") from None
    if any(offset < start or size < 0 or offset + size > contents.size or size % width for _, offset, size, width in tensors):
        raise DeltaError("no safetensors file")
    if sum(size for _, _, size, _ in tensors) != contents.size - start:
        raise DeltaError("a safetensors file with bytes of no tensor")
    return start, tensors


def _cut(tensors: list[tuple[str, int, int, int]]) -> Iterator[tuple[int, int, int]]:
    for _, offset, size, width in tensors:
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

"""Reads the part of a GGUF file before its weights: metadata, and the position of each tensor.

The format is llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and
3). This reader checks bounds, because libraries answer a truncated file with unclear errors or with
zeros.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shared.model.quiet_reading import ModelLoadError

MAGIC = b"GGUF"
FLOAT_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Type numbers of tensors of plain numbers. All other tensors hold quantised blocks, or types that
weights never have.
"""

_VERSIONS = (2, 3)
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1_000_000
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: in the file's order, fastest dimension first. offset: in bytes, from the
    start of the tensors' data.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: numbers, strings and booleans by key; for an array, only its length. data_start:
    position of the tensors' data in the file. size_bytes: the file's.
    """

    path: Path
    metadata: dict[str, int | float | bool | str]
    tensors: tuple[GgufTensor, ...]
    data_start: int
    size_bytes: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata["general.architecture"])

    @property
    def parameters(self) -> int:
        """Number of weights in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def plain_dtype(self) -> str | None:
        """The weights' type if nothing is quantised (norms may be more precise); else None."""
        found = {tensor.type_number for tensor in self.tensors}
        if not found <= FLOAT_TYPES.keys():
            return None
        return next((FLOAT_TYPES[number] for number in (30, 1) if number in found), "float32")


def read_gguf_header(path: Path) -> GgufHeader:
    """Read everything up to the weights.

    Raises:
        ModelLoadError: it is not a GGUF file, has an unknown version, or ends inside its header.
    """
    with path.open("rb") as file:
        reader = _Reader(path, file)
        if file.read(4) != MAGIC:
            raise ModelLoadError(
                f"{path} is not a GGUF file (it does not begin with the letters GGUF): give a file that llama.cpp reads"
            )
        version = reader.number("<I")
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"{path} is a GGUF file of version {version}, or from a machine with another byte order; versions 2 and 3 are "
                "supported: "
                "convert it with a current llama.cpp"
            )
        tensor_count, entries = reader.count(), reader.count()
        metadata = dict(reader.entry() for _ in range(entries))
        tensors = tuple(reader.tensor() for _ in range(tensor_count))
        alignment = int(metadata.get("general.alignment", 32)) or 32
        data_start = math.ceil(file.tell() / alignment) * alignment
        if not isinstance(metadata.get("general.architecture"), str):
            raise ModelLoadError(f"{path} does not say its architecture (general.architecture): convert the model again")
        return GgufHeader(path, metadata, tensors, data_start, reader.size_bytes)


class _Reader:
    """Reads one value after another, never past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.size_bytes = path.stat().st_size

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def count(self) -> int:
        found = self.number("<Q")
        if found > _MOST_ENTRIES:
            raise self._cut_off(f"{found} entries are announced")
        return found

    def text(self) -> str:
        return self._take(self.number("<Q")).decode("utf-8", errors="replace")

    def entry(self) -> tuple[str, int | float | bool | str]:
        key = self.text()
        return key, self._value(self.number("<I"))

    def tensor(self) -> GgufTensor:
        name = self.text()
        dimensions = self.number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise self._cut_off(f"tensor {name[:80]!r} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))
        return GgufTensor(name, shape, self.number("<I"), self.number("<Q"))

    def _value(self, kind: int) -> int | float | bool | str:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise self._cut_off(f"a value of type {kind}")
        form = _NUMBERS[kind]
        found: int | float | bool = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return found

    def _array(self) -> int:
        # Vocabularies are long and not needed here, so only their length is kept.
        kind, length = self.number("<I"), self.number("<Q")
        if kind in _NUMBERS:
            self._skip(length * struct.calcsize(_NUMBERS[kind]))
        elif kind == _STRING and length <= self.size_bytes:
            for _ in range(length):
                self._skip(self.number("<Q"))
        else:
            raise self._cut_off(f"an array of {length} values of type {kind}")
        return length

    def _take(self, size: int) -> bytes:
        if size > self.size_bytes - self._file.tell():
            raise self._cut_off(f"{size} more bytes are announced")
        return self._file.read(size)

    def _skip(self, size: int) -> None:
        if size > self.size_bytes - self._file.tell():
            raise self._cut_off(f"{size} more bytes are announced")
        self._file.seek(size, 1)

    def _cut_off(self, what: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self._path} ends inside its header or is damaged ({what} at byte {self._file.tell()} of {self.size_bytes}): "
            "download or convert it again"
        )

"""Reads the part of a GGUF file before its weights: metadata, and the position of each tensor.

The format is llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and
3). This reader checks bounds, because libraries answer a truncated file with unclear errors or with
zeros. `check_readable` refuses what `transformers` would silently omit: tensors, scaled rotary
positions, parts of a split file. Each omission would give a folder that loads but computes
something else.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from shared.model.configuration import ModelLoadError, check_layers

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


_RENAMED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
_NOT_CAUSAL = {"general", "tokenizer", "t5", "umt5", "t5encoder"}
_READS_ROPE_SCALING = {"gpt-oss", "gpt_oss", "qwen35", "qwen35moe"}


def gguf_package() -> Any:
    """The package `gguf`, which `transformers` uses to read the files.

    Raises:
        ModelLoadError: it is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise ModelLoadError(
            "reading a GGUF file needs the package gguf, which is not installed: pip install 'swarm-rl[gguf]' "
            "(in a checkout: pip install -c requirements/constraints.txt -e '.[gguf]')"
        ) from None
    return gguf


def check_readable(header: GgufHeader) -> None:
    """Refuse a file that is incomplete, or that `transformers` would turn into a different model.

    Raises:
        ModelLoadError: naming the problem.
    """
    gguf = gguf_package()
    _check_is_one_model(header)
    _check_architecture(header)
    _check_layers(header)
    _check_types(header, gguf)
    _check_whole(header, gguf)


def _check_is_one_model(header: GgufHeader) -> None:
    if int(header.metadata.get("split.count", 0) or 0) > 1:
        raise ModelLoadError(
            f"{header.path} is one of {header.metadata['split.count']} parts of a model: join them first "
            "(llama-gguf-split --merge FIRST_PART WHOLE)"
        )
    if header.metadata.get("general.type", "model") != "model" or not header.tensors:
        kind = header.metadata.get("general.type", "file without tensors")
        raise ModelLoadError(f"{header.path} does not contain a model ({kind}): give the model's file")


def _check_architecture(header: GgufHeader) -> None:
    name = header.architecture
    known = supported_architectures()
    if name not in known and _RENAMED.get(name) not in known:
        raise ModelLoadError(
            f"{header.path} holds the architecture {name[:60]!r}, which transformers {version('transformers')} does not read from "
            f"GGUF (it reads {', '.join(sorted(known))}): give the model's Hugging Face folder instead"
        )
    scaling = header.metadata.get(f"{name}.rope.scaling.type", "none")
    if name not in _READS_ROPE_SCALING and scaling != "none":
        raise ModelLoadError(
            f"{header.path} scales its rotary positions ({scaling}), which transformers ignores when it reads GGUF, so the "
            "result would be another model: give the model's Hugging Face folder instead"
        )


def _check_layers(header: GgufHeader) -> None:
    # transformers creates lists, and then a model, with as many layers as the file states.
    layers = header.metadata.get(f"{header.architecture}.block_count")
    if isinstance(layers, int | float):
        try:
            check_layers(layers)
        except ValueError as error:
            raise ModelLoadError(
                f"{header.path} is damaged or not a language model ({error}): download or convert it again"
            ) from None


def supported_architectures() -> set[str]:
    """Causal architectures that `transformers` reads from GGUF, under its own names."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = set(GGUF_SUPPORTED_ARCHITECTURES)
    try:
        newer: Any = import_module("transformers.integrations.gguf")
        known |= set(newer.GGUF_ARCHS)
    except (ImportError, AttributeError):  # older than 5.19
        pass
    return known - _NOT_CAUSAL


def _check_types(header: GgufHeader, gguf: Any) -> None:
    for number in sorted({tensor.type_number for tensor in header.tensors}):
        name = _type_name(gguf, number)
        if not _is_readable_type(gguf, number):
            tensor = next(tensor.name for tensor in header.tensors if tensor.type_number == number)
            raise ModelLoadError(
                f"{header.path} holds {tensor} in the quantisation {name}, which the package gguf {_gguf_version()} cannot turn "
                "into plain numbers: give a file in another one, such as Q8_0, Q4_K_M or F16"
            )


def _is_readable_type(gguf: Any, number: int) -> bool:
    # Tried on one block of zeros, because the package does not list what it supports.
    import numpy

    try:
        kind = gguf.GGMLQuantizationType(number)
        gguf.quants.dequantize(numpy.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=numpy.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True


def _check_whole(header: GgufHeader, gguf: Any) -> None:
    needed = header.data_start
    for tensor in header.tensors:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_number)]
        end = header.data_start + tensor.offset + tensor.elements // block_elements * block_bytes
        needed = max(needed, end)
    if needed > header.size_bytes:
        raise ModelLoadError(
            f"{header.path} is truncated: its header announces {needed} bytes and it has {header.size_bytes}: download or "
            "convert it "
            "again"
        )


def _type_name(gguf: Any, number: int) -> str:
    try:
        return str(gguf.GGMLQuantizationType(number).name)
    except ValueError:
        return f"number {number}"


def _gguf_version() -> str:
    try:
        return version("gguf")
    except PackageNotFoundError:
        return ""

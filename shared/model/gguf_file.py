"""Reads what a GGUF file says of its model, through the package `gguf`, and refuses a file that
`transformers` would turn into another model.

`transformers` silently omits what it does not know: tensors, scaled rotary positions, parts of a
split file. Each omission would give a folder that loads but computes something else.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from shared.model.configuration import ModelLoadError, check_layers

_PLAIN = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_RENAMED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
_NOT_CAUSAL = {"general", "tokenizer", "t5", "umt5", "t5encoder"}
_READS_ROPE_SCALING = {"gpt-oss", "gpt_oss", "qwen35", "qwen35moe"}


class GgufFile:
    """A file that `transformers` reads as the model that it describes.

    architecture: llama.cpp's name of it. tensors: each with `name`, `n_elements` and `tensor_type`.

    Raises:
        ModelLoadError: it is no GGUF file, or incomplete, or would become another model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _reader(path)
        except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
            raise ModelLoadError(
                f"{path} is not a GGUF file that the package gguf {version('gguf')} reads ({error}): download or convert it again, "
                "or give a file in another quantisation, such as Q8_0, Q4_K_M or F16"
            ) from None
        if self._reader.byte_order != "I":
            raise ModelLoadError(f"{path} is a GGUF file for machines with another byte order: convert the model again")
        self.tensors: list[Any] = self._reader.tensors
        self.architecture = str(self.value("general.architecture", ""))
        self._check_is_one_model()
        self._check_architecture()
        self._check_types()

    def value(self, key: str, default: Any = None) -> Any:
        """The number, text or truth value of a key; of a list only its length."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        return len(field.data) if field.types[0].name == "ARRAY" else field.contents()

    @property
    def parameters(self) -> int:
        """Number of weights in all tensors."""
        return sum(int(tensor.n_elements) for tensor in self.tensors)

    @property
    def plain_dtype(self) -> str | None:
        """The weights' dtype if nothing is quantised (norms may be more precise); else None."""
        found = {tensor.tensor_type.name for tensor in self.tensors}
        return next(dtype for name, dtype in _PLAIN.items() if name in found) if found <= _PLAIN.keys() else None

    def _check_is_one_model(self) -> None:
        parts = self.value("split.count", 0)
        if isinstance(parts, int | float) and parts > 1:
            raise ModelLoadError(
                f"{self.path} is one of {parts} parts of a model: join them first (llama-gguf-split --merge FIRST_PART WHOLE)"
            )
        kind = self.value("general.type", "model")
        if kind != "model" or not self.tensors or not self.architecture:
            found = kind if kind != "model" else "no tensors" if not self.tensors else "no general.architecture"
            raise ModelLoadError(f"{self.path} does not contain a model ({found}): give the model's file, or convert it again")

    def _check_architecture(self) -> None:
        name, known = self.architecture, supported_architectures()
        if name not in known and _RENAMED.get(name) not in known:
            raise ModelLoadError(
                f"{self.path} holds the architecture {name[:60]!r}, which transformers {version('transformers')} does not read "
                f"from GGUF (it reads {', '.join(sorted(known))}): give the model's Hugging Face folder instead"
            )
        scaling = self.value(f"{name}.rope.scaling.type", "none")
        if name not in _READS_ROPE_SCALING and scaling != "none":
            raise ModelLoadError(
                f"{self.path} scales its rotary positions ({scaling}), which transformers ignores when it reads GGUF, so the "
                "result would be another model: give the model's Hugging Face folder instead"
            )
        # transformers creates lists, and then a model, with as many layers as the file states.
        layers = self.value(f"{name}.block_count")
        if isinstance(layers, int | float):
            try:
                check_layers(layers)
            except ValueError as error:
                raise ModelLoadError(
                    f"{self.path} is damaged or not a language model ({error}): download or convert it again"
                ) from None

    def _check_types(self) -> None:
        for kind, name in {tensor.tensor_type: tensor.name for tensor in self.tensors}.items():
            if not _is_readable(kind):
                raise ModelLoadError(
                    f"{self.path} holds {name} in the quantisation {kind.name}, which the package gguf {version('gguf')} cannot "
                    "turn into plain numbers: give a file in another one, such as Q8_0, Q4_K_M or F16"
                )


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


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """In the block, `transformers` uses the reader of this module, which makes each file's fields
    and an architecture's table of names once: they take seconds. Without the package `gguf`,
    nothing is changed.
    """
    try:
        import gguf
    except ImportError:
        yield
        return
    before: dict[str, Any] = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    gguf.GGUFReader = _reader
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        for name, made in before.items():
            setattr(gguf, name, made)


def _reader(path: str | Path) -> Any:
    """The package's reader of a file. Raises ModelLoadError: it is not installed, or the file is
    truncated.
    """
    try:
        from gguf import gguf_reader
    except ImportError:
        raise ModelLoadError(
            "reading a GGUF file needs the package gguf, which is not installed: pip install 'swarm-rl[gguf]' "
            "(in a checkout: pip install -c requirements/constraints.txt -e '.[gguf]')"
        ) from None
    stat = os.stat(path)
    return _made(gguf_reader.GGUFReader, os.path.realpath(path), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _made(base: Any, path: str, size: int, _: int) -> Any:
    class BoundedReader(base):  # type: ignore[misc]
        """Past the end of a file the package reads short arrays, of which some loops never end."""

        def _get(self, offset: int, dtype: Any, count: Any = 1, *more: Any, **named: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > size:
                raise ModelLoadError(
                    f"{path} is truncated or damaged: it announces {end} bytes and has {size}: download or convert it again"
                )
            return super()._get(offset, dtype, count, *more, **named)

    return BoundedReader(path)


def _is_readable(kind: Any) -> bool:
    # Tried on one block of zeros, because the package does not list what it supports.
    import gguf

    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True

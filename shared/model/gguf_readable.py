"""Checks, from a GGUF file's header alone, that `transformers` builds the model that the file
describes.

`transformers` silently omits what it does not know: tensors, scaled rotary positions, parts of a
split file. Each omission would give a folder that loads but computes something else.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shared.model.configuration import check_layers
from shared.model.gguf_header import GgufHeader
from shared.model.quiet_reading import ModelLoadError

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

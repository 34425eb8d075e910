"""The files that hold a model's weights: which ones `transformers` reads, whether they are whole,
and whether their numbers can be weights. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import mmap
import operator
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shared.hub_models import hub_arguments
from shared.model.configuration import ModelLoadError

INDEX = "model.safetensors.index.json"
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_EXPONENTS: dict[str, tuple[Any, int]] = {
    "F64": (np.uint64, 0x7FF0 << 48),
    "F32": (np.uint32, 0x7F80 << 16),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""Unsigned type and exponent bits of the float types; a number whose exponent bits are all set is
NaN or infinite.
"""
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_AT_ONCE = 2**24


def weights_folder(path: str, revision: str) -> Path | None:
    """The folder that holds the files of a folder or hub name; None: a hub name of which nothing is
    in the cache.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json", revision=hub_arguments(path, revision)["revision"])
    return Path(found).parent if isinstance(found, str) else None


def local_weights(path: str, revision: str) -> list[Path]:
    """The weight files of a folder, or of a hub name if all of them are in the cache, else none.

    Raises:
        ModelLoadError: the folder's are not whole; those of a hub name may still be on their way.
    """
    folder = weights_folder(path, revision)
    try:
        return [] if folder is None else weight_files(folder)
    except ModelLoadError:
        if Path(path).is_dir():
            raise
        return []


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads, after a check that they are whole.

    Raises:
        ModelLoadError: there are none, one is missing or truncated, or other engines would read
            other ones.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            absent = [name for name in named if not (folder / name).is_file()]
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise ModelLoadError(f"{index} cannot be read: copy the folder again") from None
        if absent:
            raise ModelLoadError(f"{folder} lacks {absent[0][:100]} ({len(absent)} of {len(named)} parts): copy the whole folder")
    # transformers looks for these in this order.
    for whole in _WHOLE:
        listed = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            files = [folder / whole]
        elif listed.is_file():
            files = [folder / name for name in sorted(set(json.loads(listed.read_text(encoding="utf-8"))["weight_map"].values()))]
        else:
            continue
        break
    else:
        raise ModelLoadError(f"{folder} holds no weights (model.safetensors or pytorch_model.bin): copy the whole folder")
    if others := sorted(set(folder.glob("model*.safetensors")) - set(files)):
        raise ModelLoadError(
            f"{folder} holds weights twice: transformers reads {files[0].name} and other engines read {others[0].name} too: "
            "delete the files that are out of date, and the index if it names them"
        )
    for file in files:
        if file.suffix == ".safetensors":
            tensors_of(file)
    return files


def tensors_of(file: Path) -> dict[str, Any]:
    """The entries of a safetensors file's header by tensor: dtype, shape, and `place`, the first
    and last byte in the file.

    Raises:
        ModelLoadError: it is not a safetensors file, truncated, or its tensors are not one after
            the other with the sizes of their numbers.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            raise ModelLoadError(f"{file} is not a safetensors file, or its header is truncated: copy it again")
        try:
            header = {name: entry for name, entry in json.loads(opened.read(length)).items() if name != "__metadata__"}
            for entry in header.values():
                begin, end = map(operator.index, entry["data_offsets"])
                entry["place"] = 8 + length + begin, 8 + length + end
                _ = entry["dtype"], tuple(entry["shape"])
            places = sorted(entry["place"] for entry in header.values())
            unfit = next((name for name, entry in header.items() if not _is_placed(entry)), "")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelLoadError(f"{file} has a header that cannot be read: copy it again") from None
    if unfit:
        raise ModelLoadError(f"{file} gives the tensor {unfit} a place that does not fit its shape and type: save or copy it again")
    data = 8 + length
    if any(begin < before for (_, before), (begin, _) in pairwise([(data, data), *places])):
        raise ModelLoadError(f"{file} has tensors that share bytes, so one of them is not what was saved: save or copy it again")
    needed = places[-1][1] if places else data
    if needed > size:
        raise ModelLoadError(f"{file} is truncated: its header announces {needed} bytes and it has {size}: copy it again")
    if data + sum(end - begin for begin, end in places) < size:
        raise ModelLoadError(f"{file} holds bytes that belong to no tensor, as a file that was patched does: save or copy it again")
    return header


def _is_placed(entry: Mapping[str, Any]) -> bool:
    """Check that a tensor's place has the size of its numbers. Raises TypeError for a shape that is
    none.
    """
    begin, end = entry["place"]
    item = _ITEM_BYTES.get(entry["dtype"])
    return bool(0 <= begin <= end) and (item is None or end - begin == item * math.prod(map(operator.index, entry["shape"])))


def check_values(files: Sequence[Path], tied: Mapping[str, str], needed: Collection[str]) -> None:
    """Check the numbers in safetensors files without torch; files in torch's format are not read.

    tied: for each tensor that the model shares with another one, the other one's name. needed: as
    for `zero_problem`.

    Raises:
        ModelLoadError: a number is NaN or infinite, matrices are wholly 0 that never are in a
            trained model, or two tensors that are one in the model differ.
    """
    held: dict[str, Any] = {}
    zero: dict[str, bool] = {}
    for file in files:
        if file.suffix != ".safetensors":
            continue
        for name, values, dtype, dimensions in _arrays(file):
            if dimensions >= 2 and dtype in _EXPONENTS:
                zero[name] = not values[:_AT_ONCE].any() and not values.any()
            if name in tied or name in tied.values():
                held[name] = values
            unsigned, exponent = _EXPONENTS.get(dtype, (np.uint8, 256))
            for first in range(0, len(values) if dtype in _EXPONENTS else 0, _AT_ONCE):
                if int((values[first : first + _AT_ONCE].view(unsigned) & unsigned(exponent)).max()) == exponent:
                    raise ModelLoadError(not_finite(str(file), name))
    if files and (problem := zero_problem(str(files[0].parent), zero, needed)):
        raise ModelLoadError(problem)
    for name, other in tied.items():
        if name in held and other in held and not np.array_equal(held[name], held[other]):
            raise ModelLoadError(tied_and_not(str(files[0].parent), name, other))


def _arrays(file: Path) -> Iterator[tuple[str, Any, str, int]]:
    """Each tensor's name, bytes, dtype and number of dimensions."""
    entries = tensors_of(file)
    if not entries:
        return
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    for name, entry in entries.items():
        begin, end = entry["place"]
        yield name, np.frombuffer(mapped, dtype=np.uint8, count=end - begin, offset=begin), entry["dtype"], len(entry["shape"])


def zero_problem(origin: str, zero: Mapping[str, bool], needed: Collection[str]) -> str:
    """Why a model's matrices cannot be trained ones; empty if they can. zero: of each, whether it
    is wholly 0. needed: names of its embedding and output layer in the model; a file may leave out
    how they begin.

    A download that broke off leaves zeros. A model may have some such matrices from its start, but
    neither its embedding nor its output layer, nor many; one with nothing but zeros is a stand-in.
    """
    found = sorted(name for name, is_zero in zero.items() if is_zero)
    first = next((name for name in found if any(f".{each}".endswith(f".{name}") for each in needed)), "")
    if len(found) == len(zero) or not (first or len(found) * 4 > len(zero)):
        return ""
    return (
        f"{origin}: the weight {first or found[0]} is wholly 0 ({len(found)} of {len(zero)} matrices are), as a download that "
        "broke off leaves it: copy the weights again"
    )


def not_finite(origin: str, tensor: str, *, narrow: bool = False) -> str:
    """Describe a weight that is no number. narrow: as it is read, in float16."""
    remedy = "set model.dtype to bfloat16 or float32, " if narrow else ""
    return (
        f"{origin}: the weight {tensor} holds NaN or infinity{' in float16' * narrow}, so every answer would be noise: {remedy}"
        "take an earlier checkpoint, or copy the file again"
    )


def tied_and_not(origin: str, tensor: str, other: str) -> str:
    """Describe a file with two different tensors where the configuration has one."""
    return (
        f"{origin}: config.json says that {tensor} is {other} (tie_word_embeddings), and the file holds two different tensors, so "
        "that trainer and engines would compute different models: set tie_word_embeddings to false in config.json if the "
        f"model was trained with both, else remove {tensor} from the file"
    )

"""The files that hold a model's weights: which ones `transformers` reads, and whether they are
whole. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from shared.hub_models import hub_arguments
from shared.model.configuration import ModelLoadError

INDEX = "model.safetensors.index.json"
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


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
        ModelLoadError: there are none, one is missing or truncated, other engines would read other
            ones, or a tensor is in two, or in another one than the index says.
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
    _check_one_place(folder, [file for file in files if file.suffix == ".safetensors"])
    return files


def _check_one_place(folder: Path, files: Sequence[Path]) -> None:
    """Refuse a tensor that is in two files, or elsewhere than the index says: engines read
    different ones then.
    """
    held: dict[str, str] = {}
    for file in files:
        for name in tensors_of(file):
            if name in held:
                raise ModelLoadError(tensor_twice(str(folder), name, held[name], file.name))
            held[name] = file.name
    index = folder / INDEX
    if len(files) < 2 or not index.is_file():
        return
    for name, told in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
        if held.get(name, told) != told:
            raise ModelLoadError(
                f"{folder}: {INDEX} says that the tensor {name} is in {str(told)[:100]}, and it is in {held[name]}, so the index "
                "and the files are of two models: copy the whole folder again"
            )


def tensor_twice(origin: str, name: str, first: str, second: str) -> str:
    """Say that a tensor is in two files, and what to do."""
    return (
        f"{origin} holds the tensor {name} twice, in {first} and in {second}, so that one of them would be taken by chance: copy "
        "the whole folder again, or save the model again"
    )


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

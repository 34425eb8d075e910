"""Writes and reads LoRA adapters as a policy file: only their factors, in float32 under peft's
names, with a description that identifies their base model.

A file is safetensors with the metadata key `swarm_adapters`; a policy file without it holds full
weights. A reader with the base model adds scaling x B x A to each adapted layer's output, so
nothing is rounded into the base's weights.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shared.model.quiet_reading import ModelLoadError
from shared.model.weight_files import tensors_of, weight_files, weights_folder
from shared.model.weights import WeightsError, as_it_is, trainable_tensors

METADATA_KEY = "swarm_adapters"
_PREFIX = "base_model.model."
_ADAPTER = ".default"
_NAMED = re.compile(r"\.default(\.weight)?$")
_PARTS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
_BLOCKS = 4
"""Blocks hashed of each tensor. A step at a small learning rate changes a hundredth of a tensor's
bfloat16 weights, and therefore some of the 8,192 in these blocks.
"""
_BLOCK_BYTES = 4096


class Adapters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description in a file of adapters.

    base: the `base_fingerprint` of the model that they were trained on. dtype: the dtype of the
    trainer's weights.
    """

    rank: int
    alpha: float
    base: str
    dtype: str

    def metadata(self) -> dict[str, str]:
        """The description as it is stored in the file's header."""
        return {METADATA_KEY: msgspec.json.encode(self, order="sorted").decode()}

    def peft_config(self, modules: list[str]) -> dict[str, Any]:
        """Contents of peft's `adapter_config.json` for adapters of `modules`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": modules,
            "bias": "none",
            "inference_mode": True,
        }


def adapter_tensors(model: nn.Module, whole: Callable[[Tensor], Tensor] = as_it_is) -> dict[str, Tensor]:
    """The factors of all adapters of a peft model, on the CPU, under the names that peft saves them
    with.
    """
    return {_NAMED.sub(r"\1", name): value.float() for name, value in trainable_tensors(model, whole).items()}


def adapted_module(tensor_name: str) -> tuple[str, str]:
    """A saved factor's module under its Hugging Face name, and the parameter's name below it in a
    model with adapters.

    Raises: WeightsError: it does not belong to an adapter.
    """
    for part in _PARTS:
        if tensor_name.startswith(_PREFIX) and tensor_name.endswith(part):
            factor, _, attribute = part.removeprefix(".").partition(".")
            below = f"{factor}{_ADAPTER}" + (f".{attribute}" if attribute else "")
            return tensor_name.removeprefix(_PREFIX).removesuffix(part), below
    raise WeightsError(f"{tensor_name[:200]!r} is not the name of a LoRA factor")


def read_adapters(file: Path) -> Adapters | None:
    """The description of a policy file's adapters; None if it holds full weights.

    Raises: WeightsError: it cannot be read, or has no usable description.
    """
    try:
        with safe_open(str(file), framework="pt") as tensors:
            text = (tensors.metadata() or {}).get(METADATA_KEY)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"policy file {file}: unreadable or truncated ({error}): fetch it again") from None
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=Adapters)
    except msgspec.MsgspecError as error:
        raise WeightsError(
            f"policy file {file}: the description of its adapters cannot be read ({error}): run the same version of trainer "
            "and generator"
        ) from None
    if found.rank < 1 or not found.alpha > 0:
        raise WeightsError(f"policy file {file}: adapters of rank {found.rank} and alpha {found.alpha} are invalid")
    return found


def base_fingerprint(model_path: str, revision: str = "") -> str:
    """Identifies the weights of a model's folder or hub name: the same wherever the files are the
    same, whatever dtype they are read in.

    Covers only the files that transformers loads. It hashes each file's size and, for safetensors,
    names, shapes, dtypes and four blocks of 4 KiB of every tensor. These differ if the base was
    trained, quantised or replaced, and a large model need not be read in full.

    Raises:
        WeightsError: there are no weights, or they cannot be read.
    """
    digest = hashlib.sha256()
    try:
        folder = weights_folder(model_path, revision)
        if folder is None:
            raise WeightsError(f"model {model_path}: is not in the hub's cache")
        for file in weight_files(folder):
            _add(digest, file)
    except (OSError, ModelLoadError) as error:
        raise WeightsError(f"model {model_path}: its weights cannot be read ({type(error).__name__}: {error})") from None
    return digest.hexdigest()


def _add(digest: Any, file: Path) -> None:
    """Hash a safetensors file's header (names, shapes and dtypes) and `_BLOCKS` blocks of each
    tensor, spread from its first byte to its last; of any other file, as many blocks of the whole
    file. Offsets in the header count from the header's end.
    """
    size = file.stat().st_size
    digest.update(f"{file.name} {size}\n".encode())
    with file.open("rb") as stream:
        places = [(0, size)]
        if file.suffix == ".safetensors":
            entries = sorted(entry["place"] for entry in tensors_of(file).values())
            digest.update(stream.read(int.from_bytes(stream.read(8), "little")))
            places = [(begin, end - begin) for begin, end in entries]
        for begin, held in places:
            for number in range(_BLOCKS):
                stream.seek(begin + number * max(0, held - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(stream.read(min(_BLOCK_BYTES, held)))


def modules_of(tensors: Mapping[str, Any]) -> list[str]:
    """The adapted modules, in order."""
    return sorted({adapted_module(name)[0] for name in tensors})


def write_peft_folder(file: Path, adapters: Adapters, modules: list[str], folder: Path) -> None:
    """Create `folder` in the form from which peft and vLLM load adapters: a copy of the file, so
    that the original may be deleted, and its configuration.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True)
    shutil.copyfile(file, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapters.peft_config(modules)), encoding="utf-8")

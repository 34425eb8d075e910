"""LoRA adapters as a policy file: their factors alone, in float32 under peft's names, what they are, and which base they are for.

A file is safetensors with the metadata key `swarm_adapters`; a policy file without it holds all weights. Whoever has the base model
adds scaling x B x A to each adapted layer's output, so that nothing is rounded into the base's weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shared.hub_models import hub_arguments
from shared.model.weights import WeightsError, as_it_is, trainable_tensors

METADATA_KEY = "swarm_adapters"
_PREFIX = "base_model.model."
_ADAPTER = ".default"
_PARTS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
_BLOCKS = 64
_BLOCK_BYTES = 4096
_LONGEST_HEADER = 64 << 20


class Adapters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file of adapters says about itself. `base`: the `base_fingerprint` of the model that they were trained on."""

    rank: int
    alpha: float
    base: str

    @property
    def scaling(self) -> float:
        """What B x A is multiplied by."""
        return self.alpha / self.rank

    def metadata(self) -> dict[str, str]:
        """For the file's header."""
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
    """The factors of all adapters of a peft model, on the CPU, under the names that peft saves them with."""
    return {name.replace(_ADAPTER, ""): value.float() for name, value in trainable_tensors(model, whole).items()}


def adapted_module(tensor_name: str) -> tuple[str, str]:
    """A saved factor's module under its Hugging Face name, and the parameter's name below it in a model with adapters.

    Raises:
        WeightsError: it is no adapter's.
    """
    for part in _PARTS:
        if tensor_name.startswith(_PREFIX) and tensor_name.endswith(part):
            factor, _, attribute = part.removeprefix(".").partition(".")
            below = f"{factor}{_ADAPTER}" + (f".{attribute}" if attribute else "")
            return tensor_name.removeprefix(_PREFIX).removesuffix(part), below
    raise WeightsError(f"{tensor_name[:200]!r} is no LoRA factor's name")


def read_adapters(file: Path) -> Adapters | None:
    """What a policy file says of its adapters; None: it holds all weights.

    Raises:
        WeightsError: it cannot be read, or says nothing of use.
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
            f"policy file {file}: what it says of its adapters cannot be read ({error}): run trainer and generator at one version"
        ) from None
    if found.rank < 1 or not found.alpha > 0:
        raise WeightsError(f"policy file {file}: adapters of rank {found.rank} and alpha {found.alpha} are none")
    return found


def base_fingerprint(model_path: str, revision: str = "") -> str:
    """Which weights a model's folder or hub name holds: the same wherever the files are the same, in whatever dtype they are read.

    Of each file its name and size, of safetensors the header, which has all names, shapes and dtypes, and 64 blocks of 4 KiB spread
    over it are hashed: a base that was trained on, quantised or exchanged differs in them, and a large model is not read for it.

    Raises:
        WeightsError: there are no weights.
    """
    folder = _folder(model_path, revision)
    files = [] if folder is None else sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise WeightsError(f"model {model_path}: holds no weights (*.safetensors, *.bin) that it could be told by")
    digest = hashlib.sha256()
    for file in files:
        _add(digest, file)
    return digest.hexdigest()


def _add(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}\n".encode())
    with file.open("rb") as stream:
        if file.suffix == ".safetensors":
            digest.update(stream.read(min(int.from_bytes(stream.read(8), "little"), _LONGEST_HEADER)))
        begin = stream.tell()
        for number in range(_BLOCKS):
            stream.seek(begin + number * max(0, size - begin - _BLOCK_BYTES) // (_BLOCKS - 1))
            digest.update(stream.read(_BLOCK_BYTES))


def _folder(model_path: str, revision: str) -> Path | None:
    if Path(model_path).is_dir():
        return Path(model_path)
    from transformers.utils import cached_file

    pinned = hub_arguments(model_path, revision)
    found = cached_file(model_path, "config.json", revision=pinned["revision"])
    return Path(found).parent if found else None


def modules_of(tensors: Mapping[str, Any]) -> list[str]:
    """The adapted modules, in order."""
    return sorted({adapted_module(name)[0] for name in tensors})


def write_peft_folder(file: Path, adapters: Adapters, modules: list[str], folder: Path) -> None:
    """Make `folder` what peft and vLLM load adapters from: the file under the name they want, and its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "adapter_model.safetensors"
    weights.unlink(missing_ok=True)
    weights.hardlink_to(file)
    (folder / "adapter_config.json").write_text(json.dumps(adapters.peft_config(modules)), encoding="utf-8")

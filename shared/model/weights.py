"""A policy as one safetensors file, in either of two forms.

Full weights: Hugging Face parameter names, adapters merged in float32 with one rounding, tied
tensors stored once. Adapters alone: LoRA factors in float32 under peft's names, with the metadata
key `swarm_adapters`, which identifies their base model. A reader with that model adds
scaling x B x A to each adapted layer's output, so nothing is rounded into the base's weights.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from shared.model.configuration import ModelLoadError
from shared.model.weight_files import tensors_of, weight_files, weights_folder

_ADAPTER_MARK = ".lora_"
_WRAPPED = ".base_layer."
_PEFT_PREFIX = "base_model.model."


def as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged, for a process that holds all of it."""
    return tensor


def _all_of_it(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor


class WeightsError(RuntimeError):
    """A weights file does not fit the model or cannot be read; the message names the cause and the
    remedy.
    """


@torch.no_grad()
def policy_tensors(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    whole: Callable[[Tensor], Tensor] = as_it_is,
    tally: RoundingTally | None = None,
) -> dict[str, Tensor]:
    """The policy as the model computes it, on the CPU, in `dtype` (None: unchanged), under Hugging
    Face names.

    LoRA adapters are added to the weights they adapt, in float32 with one rounding, without
    changing the model; `tally` counts what that rounding loses. Tensors that no gradient changes (a
    router's bias) keep their dtype, because rounding them would send tokens to other experts than
    in the base policy. A tied tensor appears only under its stored name, not under its alias.
    Tensors that are not floats (a table of experts by token) belong to the base model and are left
    out. `whole` assembles a tensor if this process holds only a part of it.
    """
    tied = tied_names(model)
    fixed = {name for name, _ in model.named_buffers()}
    adapted = adapted_layers(model)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if _ADAPTER_MARK in name or not value.is_floating_point():
            continue
        plain = plain_name(name)
        if plain not in tied:
            layer = adapted.get(name)
            rounded = None if name in fixed else dtype
            tensors[plain] = _on_cpu(value if layer is None else merged_weight(layer, dtype, tally), rounded, whole)
    return tensors


def trainable_tensors(model: nn.Module, whole: Callable[[Tensor], Tensor] = as_it_is) -> dict[str, Tensor]:
    """The trained parameters under the model's own names (adapters only, with LoRA), on the CPU,
    assembled by `whole`.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: _on_cpu(parameter, None, whole) for name, parameter in trained.items()}


@torch.no_grad()
def load_trainable(model: nn.Module, tensors: Mapping[str, Tensor], part: Callable[[Tensor, Tensor], Tensor] = _all_of_it) -> None:
    """Inverse of `trainable_tensors`, in place. `part` cuts a whole tensor to the shard that a
    parameter holds.

    Raises:
        WeightsError: names or shapes differ.
    """
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    _check_same_names(wanted.keys(), tensors.keys())
    for name, parameter in wanted.items():
        _copy(name, parameter, tensors[name], part)


@torch.no_grad()
def load_policy_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a policy (as `policy_tensors` gives it) into a model without adapters, in place.

    Raises:
        WeightsError: names or shapes differ.
    """
    tied = tied_names(model)
    wanted = {name: value for name, value in model.state_dict().items() if name not in tied and value.is_floating_point()}
    _check_same_names(wanted.keys(), {name for name in tensors if name not in tied})
    for name, value in wanted.items():
        _copy(name, value, tensors[name])


def serialize(tensors: Mapping[str, Tensor]) -> bytes:
    """Bytes of a safetensors file: the same tensors give the same bytes."""
    payload: bytes = save({name: tensors[name] for name in sorted(tensors)}, metadata={"format": "pt"})
    return payload


def write_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the same bytes as `serialize` directly from the tensors' memory, which saves most of
    the time for a large policy.

    `metadata`: one additional entry in the header. With several, safetensors writes them in any
    order, and equal files would differ.

    Raises:
        OSError: it cannot be written. The safetensors library gives only the text of the error.
    """
    try:
        save_file({name: tensors[name] for name in sorted(tensors)}, file, metadata=dict(metadata or {"format": "pt"}))
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from None


def tied_names(model: Any) -> frozenset[str]:
    """Aliases of tensors that the model stores under another name (`lm_head.weight` with tied
    embeddings).
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return frozenset(getattr(base, "all_tied_weights_keys", None) or {})


def plain_name(name: str) -> str:
    """The Hugging Face name of a parameter, also if adapters wrap its layer."""
    return name.removeprefix(_PEFT_PREFIX).replace(_WRAPPED, ".")


def _on_cpu(value: Tensor, dtype: torch.dtype | None, whole: Callable[[Tensor], Tensor]) -> Tensor:
    return whole(value.detach().to(dtype=dtype or value.dtype)).to("cpu").contiguous()


def _copy(name: str, into: Tensor, value: Tensor, part: Callable[[Tensor, Tensor], Tensor] = _all_of_it) -> None:
    if into.shape != value.shape:
        raise WeightsError(
            f"tensor {name} has shape {tuple(value.shape)}, the model's is {tuple(into.shape)}: these weights belong to another "
            "model; set model.path to the one they were trained from"
        )
    into.copy_(part(value, into))


def _check_same_names(wanted: Any, found: Any) -> None:
    missing, foreign = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or foreign:
        example = f"lacks {missing[0]}" if missing else f"has an unknown {foreign[0]}"
        raise WeightsError(
            f"these weights do not fit the model: {len(missing)} missing, {len(foreign)} unknown, e.g. it {example}: set "
            "model.path and trainer.lora to what they were trained with"
        )


@dataclass(frozen=True, slots=True)
class DeltaRounding:
    """Share of the adapters' delta survives the rounding of the merged weights, over all adapted
    weights together.

    With delta = what the adapters add, in float32, and kept = rounded(base + delta) - base:

    lost_ratio: 1 - <kept, delta> / <delta, delta>. 0: the whole delta arrives; 1: none of it. For a
        delta that is not tiny, rounding makes some elements larger and others smaller, which
        cancels out here as it does in a layer's output.
    unmoved_ratio: share of the elements with a delta whose rounded weight equals the base's.
    """

    lost_ratio: float
    unmoved_ratio: float


class RoundingTally:
    """Accumulates a `DeltaRounding` while weights are merged. If weights are sharded, each process
    counts its part.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, base: Tensor, delta: Tensor, rounded: Tensor) -> None:
        """Count one adapted weight."""
        kept = rounded.float() - base.float()
        has_delta = delta != 0
        sums = [(delta * delta).sum(), (kept * delta).sum(), has_delta.sum(), (has_delta & (kept == 0)).sum()]
        self._sums = [before + now for before, now in zip(self._sums, sums, strict=True)] if self._sums else sums

    def rounding(self, number: Callable[[Tensor], float] = float) -> DeltaRounding | None:
        """The result; None if the adapters add nothing. `number` sums a scalar over all processes,
        so every process must call this.
        """
        if not self._sums:
            return None
        wanted, kept, elements, unmoved = (number(each) for each in self._sums)
        return DeltaRounding(lost_ratio=1 - kept / wanted, unmoved_ratio=unmoved / elements) if wanted else None


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with LoRA adapters, by the name of their base weight in the model's state. The trainer
    makes no other kind of adapter.
    """
    return {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
    }


def merged_weight(layer: Any, dtype: torch.dtype | None = None, tally: RoundingTally | None = None) -> Tensor:
    """base + delta of a LoRA layer, rounded once to `dtype` (None: the base weight's). The layer is
    not changed.
    """
    base: Tensor = layer.base_layer.weight
    delta = _delta(layer)
    rounded = (base.float() + delta).to(dtype or base.dtype)
    if tally is not None:
        tally.add(base, delta, rounded)
    return rounded


def _delta(layer: Any) -> Tensor:
    """The active adapters' delta in float32. peft would multiply the two factors in their own
    dtype, or in the one that autocast chooses.
    """
    base: Tensor = layer.base_layer.weight
    layer = _with_float32_adapters(layer)
    delta = torch.zeros_like(base, dtype=torch.float32)
    with torch.autocast(base.device.type, enabled=False):
        for adapter in layer.active_adapters:
            delta = delta + layer.get_delta_weight(adapter)
    return delta


def _with_float32_adapters(layer: nn.Module) -> nn.Module:
    """The layer itself if its adapters are in float32, as the trainer's are; else a layer that
    shares everything with it except float32 copies of its adapters.
    """
    parts = {name: part for name, part in layer.named_children() if name.startswith("lora_")}
    if all(parameter.dtype == torch.float32 for part in parts.values() for parameter in part.parameters()):
        return layer
    other = copy.copy(layer)
    other._modules = {**layer._modules, **{name: copy.deepcopy(part).float() for name, part in parts.items()}}
    return other


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

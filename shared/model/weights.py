"""Stores a policy's weights as one safetensors file with Hugging Face parameter names; adapters are
merged and tied tensors stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from shared.model.adapter_merge import RoundingTally, adapted_layers, merged_weight

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


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file.

    Raises: WeightsError: it is missing, incomplete or not a safetensors file.
    """
    try:
        tensors: dict[str, Tensor] = load_file(file, device="cpu")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"weights file {file} cannot be read ({error}): restore it or use another checkpoint") from None
    return tensors


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

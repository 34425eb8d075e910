"""Merges LoRA adapters into the weights they adapt, in float32 with one rounding at the end, and
measures how much that rounding loses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


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

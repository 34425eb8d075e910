"""Sums over tokens from which a step's statistics are computed, however it was split into
micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import torch
from torch import Tensor

Number = TypeVar("Number", Tensor, float)

_MAXIMA = ("ratio_max",)


@dataclass(frozen=True, slots=True)
class Sums(Generic[Number]):
    """Sums (and one maximum) over the tokens of a part of a step.

    loss: the aggregated loss. tokens: completion tokens. dropped: tokens without loss (rejected or
    not finite). clipped, ratio, reference_kl, entropy, importance_weight: summed over `tokens`.
    ratio_max: their largest ratio. behaviour_tokens: tokens whose behaviour logprobs are known and
    finite. behaviour_kl, truncated: summed over those.
    """

    loss: Number
    tokens: Number
    dropped: Number
    clipped: Number
    ratio: Number
    ratio_max: Number
    reference_kl: Number
    entropy: Number
    importance_weight: Number
    behaviour_tokens: Number
    behaviour_kl: Number
    truncated: Number


class LossSums(Sums[Tensor]):
    """Sums as 0-d float64 tensors on the tokens' device, so that adding micro-batches never waits
    for the device.
    """

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> LossSums:
        """Sums over nothing."""
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(cls)))

    def __add__(self, other: LossSums) -> LossSums:
        """Sums of two disjoint parts."""
        return LossSums(
            *(
                torch.maximum(getattr(self, field.name), getattr(other, field.name))
                if field.name in _MAXIMA
                else getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            )
        )

    def pack(self) -> Tensor:
        """All sums in one tensor (F,), in the order of the fields."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def unpack(cls, packed: Tensor) -> LossSums:
        """Inverse of `pack`."""
        return cls(*packed.unbind())

    def to_host(self) -> Sums[float]:
        """The same sums as floats, copied in one transfer."""
        return Sums(*(float(value) for value in self.pack().tolist()))

"""AdamW for stacked policies. Each node has its own step count, learning rate and gradient norm,
and may skip a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.stacked_params import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """One node's constants, as in `torch.optim.AdamW`, with weight decay on matrices only.
    grad_clip: largest gradient norm; inf: off.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float


class StackedAdamW:
    """Moments `(nodes, parameters)` and a step count per node. The arithmetic is that of
    `torch.optim.AdamW`.
    """

    def __init__(self, architecture: Architecture, flat: Tensor, settings: Sequence[AdamWSettings]) -> None:
        self._settings = list(settings)
        self._mean = torch.zeros_like(flat)
        self._square = torch.zeros_like(flat)
        self._steps = [0] * len(settings)
        self._is_matrix: Tensor | None = None
        if any(each.weight_decay for each in settings):
            parts = [torch.full((math.prod(shape),), len(shape) >= 2) for shape in architecture.shapes().values()]
            self._is_matrix = torch.cat(parts).to(flat.device)

    @torch.no_grad()
    def step(self, flat: Tensor, gradient: Tensor, rates: Sequence[float | None]) -> list[tuple[float, bool]]:
        """Move each node's parameters in place. A node whose rate is None or whose gradient is not
        finite is skipped.

        Returns each node's gradient norm before clipping (0 if it was skipped) and whether it
        moved.
        """
        outcome = []
        norms = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64).tolist()
        for node, (rate, norm) in enumerate(zip(rates, norms, strict=True)):
            moves = rate is not None and math.isfinite(norm)
            outcome.append((norm if rate is not None else 0.0, moves))
            if moves:
                assert rate is not None
                self._move(flat[node], gradient[node], node, rate, norm)
        return outcome

    def _move(self, values: Tensor, gradient: Tensor, node: int, rate: float, norm: float) -> None:
        settings = self._settings[node]
        if math.isfinite(settings.grad_clip):
            gradient.mul_(min(1.0, settings.grad_clip / (norm + 1e-6)))
        self._steps[node] += 1
        step, (first, second) = self._steps[node], settings.betas
        if settings.weight_decay and self._is_matrix is not None:
            values.sub_(values * self._is_matrix, alpha=rate * settings.weight_decay)
        mean, square = self._mean[node], self._square[node]
        mean.lerp_(gradient, 1.0 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        denominator = square.sqrt().div_(math.sqrt(1.0 - second**step)).add_(settings.eps)
        values.addcdiv_(mean, denominator, value=-rate / (1.0 - first**step))

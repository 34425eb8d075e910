"""Weights that aggregate a loss per token to the loss of a batch.

The counts are those of the whole optimiser step, taken before it is cut into micro-batches and before any token is
rejected: a cut then changes nothing, and a rejection lowers the gradient instead of raising that of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.objectives.config import ObjectiveConfig


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Counts over a whole optimiser step: sequences with at least one token, and completion tokens."""

    sequences: int
    tokens: int

    @classmethod
    def count(cls, completion_lengths: Sequence[int]) -> Normaliser:
        """Counts for completions of these lengths, in tokens."""
        return cls(sequences=sum(length > 0 for length in completion_lengths), tokens=sum(completion_lengths))

    def __add__(self, other: Normaliser) -> Normaliser:
        """Counts of two disjoint parts of a step, such as those of two processes."""
        return Normaliser(self.sequences + other.sequences, self.tokens + other.tokens)


def token_weights(config: ObjectiveConfig, mask: Tensor, normaliser: Normaliser) -> Tensor:
    """Weights (N, T) float64 so that `(weights * token_loss).sum()`, added over all micro-batches, is the loss.

    mask: (N, T) bool, True on completion tokens, before rejection. A sequence must not be cut over micro-batches.
    """
    present = mask.to(torch.float64)
    if config.aggregated_by == "token_mean":
        return present / max(normaliser.tokens, 1)
    sequences = max(normaliser.sequences, 1)
    if config.aggregated_by == "fixed_length":
        assert config.max_completion_tokens is not None
        return present / (sequences * config.max_completion_tokens)
    return present / present.sum(dim=1, keepdim=True).clamp(min=1.0) / sequences

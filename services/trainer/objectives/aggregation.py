"""Weights that aggregate per-token losses into the loss of a batch.

The counts are those of the whole optimizer step, before it is split into micro-batches, so that
splitting changes nothing. Dropped tokens do not count, so that a sender of many of them cannot make
the others' gradient small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from services.trainer.objectives.base import Aggregation
from services.trainer.objectives.config import ConfiguredObjective


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Counts over a whole optimizer step: sequences with at least one token of loss, and tokens of
    loss (multiplied by the share of groups that count in part).

    divergence: the same for the divergence to the reference policy, which is a mean of its own:
    over all groups, also those that have no loss otherwise. None: there is no such divergence.
    """

    sequences: int
    tokens: float
    divergence: Normaliser | None = None

    @classmethod
    def count(cls, completion_lengths: Sequence[int], share: float = 1.0) -> Normaliser:
        """Counts for completions of which these numbers of tokens are kept."""
        return cls(sequences=sum(length > 0 for length in completion_lengths), tokens=share * sum(completion_lengths))

    def __add__(self, other: Normaliser) -> Normaliser:
        """Counts of two disjoint parts of a step, such as those of two processes."""
        divergence = other.divergence if self.divergence is None else self.divergence
        if self.divergence is not None and other.divergence is not None:
            divergence = self.divergence + other.divergence
        return Normaliser(self.sequences + other.sequences, self.tokens + other.tokens, divergence)


def token_weights(configured: ConfiguredObjective, keep: Tensor, normaliser: Normaliser) -> Tensor:
    """Weights (N, T) float64 such that `(weights * token_loss).sum()`, added over all
    micro-batches, is the loss. Raises ValueError for an aggregation that does not exist.

    keep: (N, T) bool, True on completion tokens that are not dropped. A sequence must not be split
    over micro-batches.
    """
    present = keep.to(torch.float64)
    sequences = max(normaliser.sequences, 1)
    match configured.aggregated_by:
        case "token_mean":
            return present / max(normaliser.tokens, 1)
        case "fixed_length":
            assert configured.max_completion_tokens is not None
            return present / (sequences * configured.max_completion_tokens)
        case "sequence_sum":
            return present / sequences
        case "sequence_mean":
            return present / present.sum(dim=1, keepdim=True).clamp(min=1.0) / sequences
        case unknown:
            raise ValueError(f"aggregation {unknown!r} is unknown: use {', '.join(get_args(Aggregation))}")

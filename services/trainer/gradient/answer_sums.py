"""What of each answer an optimizer update used: how many of its tokens, and with which weights.

Summed where the loss is computed, from the very tensors that it is made of, so that what is written
down is what the gradient used. Costs a few sums over tokens and one transfer an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from services.trainer.gradient.importance import ImportanceWeights
from services.trainer.objectives.token_loss import TokenLoss
from services.trainer.parallel.protocol import Parallel

AnswerPlace = tuple[int, int]
"""Number of a group in the step, and of a completion in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerUse:
    """One completion in one update. kept: tokens that have a loss. weight: their mean importance
    weight, proximal to behaviour policy as it multiplied the loss; None where the objective takes
    none, or no token is kept. clipped: tokens whose ratio to the proximal policy was clipped.
    truncated: tokens whose importance weight was cut. ratio: mean ratio to the proximal policy over
    all tokens.
    """

    kept: int
    weight: float | None
    clipped: int
    truncated: int
    ratio: float


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """Of N completions at `places`; values: (N, 6) float64 on the tokens' device."""

    places: Sequence[AnswerPlace]
    values: Tensor

    @classmethod
    def of(
        cls, places: Sequence[AnswerPlace], mask: Tensor, correction: ImportanceWeights, per_token: TokenLoss, *, weighted: bool
    ) -> AnswerSums:
        """Sums over each row of (N, T). weighted: whether the loss was multiplied by the
        correction's weights.
        """
        kept = mask & correction.keep

        def total(values: Tensor) -> Tensor:
            return values.detach().sum(dim=1, dtype=torch.float64)

        weights = total(correction.weights * kept) if weighted else torch.full_like(total(kept), torch.nan)
        sums = [total(mask), total(kept), weights, total(per_token.clipped), total(correction.truncated), total(per_token.ratio)]
        return cls(places, torch.stack(sums, dim=1))


def answer_uses(found: Iterable[AnswerSums], lengths: Mapping[int, int], parallel: Parallel) -> dict[AnswerPlace, AnswerUse]:
    """What was used of every completion. lengths: how many completions each group has that takes
    part, the same in all processes; `found` is this process's part of them.
    """
    places = [(group, completion) for group, count in lengths.items() for completion in range(count)]
    if not places:
        return {}
    row_of = {place: row for row, place in enumerate(places)}
    mine = torch.zeros(len(places), 6, dtype=torch.float64)
    parts = list(found)
    if parts:
        rows = [row_of[place] for part in parts for place in part.places]
        # A completion is computed once: nothing is added up here.
        mine[rows] = torch.cat([part.values for part in parts]).cpu()
    whole = reduce(add, parallel.gather(mine)).tolist()
    return {place: _use(*row) for place, row in zip(places, whole, strict=True)}


def _use(tokens: float, kept: float, weights: float, clipped: float, truncated: float, ratios: float) -> AnswerUse:
    known = kept > 0 and weights == weights  # NaN: the objective takes no importance weights
    return AnswerUse(
        kept=int(kept),
        weight=weights / kept if known else None,
        clipped=int(clipped),
        truncated=int(truncated),
        ratio=ratios / tokens if tokens else 0.0,
    )

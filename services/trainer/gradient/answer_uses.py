"""What an update used of each answer: sums for the record of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from services.trainer.gradient.importance import ImportanceWeights
from services.trainer.objectives.token_loss import TokenLoss
from services.trainer.parallel import Parallel

# What an update used of each answer is summed together with the loss, from the same tensors, so
# that the record shows what the gradient used. This costs a few sums over tokens and one transfer
# per update.

AnswerPlace = tuple[int, int]
"""Index of a group in the step, and of a completion in it."""

TOKENS_A_STEP = 4096
"""Number of tokens whose ratios and weights are recorded individually: at most 60 kB in the record
of a step. Only whole answers, the first of each group before the second of any.
"""

TokenFigures = tuple[tuple[float | None, float | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerUse:
    """One completion in one update. kept: number of tokens with a loss. weight: their mean
    importance weight, proximal to behaviour policy, as it multiplied the loss; None if the
    objective uses none, or no token is kept. clipped: number of tokens whose ratio to the proximal
    policy was clipped. truncated: number of tokens whose importance weight was truncated. ratio:
    mean ratio to the proximal policy over all tokens. each: for each token, its ratio to the
    behaviour policy before any cap, and its importance weight, None where there is none; None
    beyond `TOKENS_A_STEP`.
    """

    kept: int
    weight: float | None
    clipped: int
    truncated: int
    ratio: float
    each: TokenFigures | None = None


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """Sums of N completions at `places`; values: (N, 6) float64, each: (N, T, 2) float32, on the
    tokens' device.
    """

    places: Sequence[AnswerPlace]
    values: Tensor
    each: Tensor

    @classmethod
    def of(
        cls,
        places: Sequence[AnswerPlace],
        mask: Tensor,
        correction: ImportanceWeights,
        per_token: TokenLoss,
        log_ratio: Tensor,
        *,
        weighted: bool,
    ) -> AnswerSums:
        """Sums over each row of (N, T). log_ratio: proximal to behaviour policy, any value where
        the latter is unknown. weighted: whether the loss was multiplied by the correction's
        weights.
        """
        kept = mask & correction.keep

        def total(values: Tensor) -> Tensor:
            return values.detach().sum(dim=1, dtype=torch.float64)

        weights = total(correction.weights * kept) if weighted else torch.full_like(total(kept), torch.nan)
        sums = [total(mask), total(kept), weights, total(per_token.clipped), total(correction.truncated), total(per_token.ratio)]
        ratio = log_ratio.detach().exp().masked_fill(~correction.known, torch.nan)
        weight = correction.weights.detach().masked_fill(~kept, torch.nan) if weighted else torch.full_like(ratio, torch.nan)
        return cls(places, torch.stack(sums, dim=1), torch.stack([ratio, weight], dim=2).float())


def answer_uses(
    found: Iterable[AnswerSums], lengths: Mapping[int, Sequence[int]], parallel: Parallel
) -> dict[AnswerPlace, AnswerUse]:
    """Sum up what was used of every completion. lengths: tokens of each completion of the groups
    that take part, the same in all processes; `found` is this process's part of them.
    """
    places = [(group, completion) for group, each in lengths.items() for completion in range(len(each))]
    if not places:
        return {}
    row_of = {place: row for row, place in enumerate(places)}
    mine = torch.zeros(len(places), 6, dtype=torch.float64)
    parts = list(found)
    if parts:
        rows = [row_of[place] for part in parts for place in part.places]
        # Each completion is computed in one place only, so nothing is summed here.
        mine[rows] = torch.cat([part.values for part in parts]).cpu()
    whole = reduce(add, parallel.gather(mine)).tolist()
    each = _each_token(parts, {place: lengths[place[0]][place[1]] for place in shown_places(lengths)}, parallel)
    return {place: _use(*row, each=each.get(place)) for place, row in zip(places, whole, strict=True)}


def shown_places(lengths: Mapping[int, Sequence[int]], most_tokens: int = TOKENS_A_STEP) -> list[AnswerPlace]:
    """The answers whose tokens are recorded individually, in order of selection. Selection ends at
    the first answer that is too long for the remaining room, so that a step's record does not
    depend on chance.
    """
    by_turn = sorted((completion, group) for group, each in lengths.items() for completion in range(len(each)))
    chosen, left = [], most_tokens
    for completion, group in by_turn:
        left -= lengths[group][completion]
        if left < 0:
            break
        chosen.append((group, completion))
    return chosen


def _each_token(
    parts: Sequence[AnswerSums], lengths: Mapping[AnswerPlace, int], parallel: Parallel
) -> dict[AnswerPlace, TokenFigures]:
    """The values of the answers in `lengths`, over all processes: one transfer and one exchange."""
    if not lengths:
        return {}
    slices, ends = {}, 0
    for place, length in lengths.items():
        slices[place], ends = slice(ends, ends + length), ends + length
    computed = [(place, part.each[row]) for part in parts for row, place in enumerate(part.places) if place in lengths]
    mine = torch.zeros(ends, 2)
    if computed:
        values = torch.cat([rows[: lengths[place]] for place, rows in computed]).cpu()
        for (place, _), rows in zip(computed, torch.split(values, [lengths[place] for place, _ in computed]), strict=True):
            mine[slices[place]] = rows
    numbers = reduce(add, parallel.gather(mine)).tolist()
    whole = [(_known(ratio), _known(weight)) for ratio, weight in numbers]
    return {place: tuple(whole[part]) for place, part in slices.items()}


def _known(value: float) -> float | None:
    return None if value != value else value  # NaN


def _use(
    tokens: float, kept: float, weights: float, clipped: float, truncated: float, ratios: float, *, each: TokenFigures | None
) -> AnswerUse:
    known = kept > 0 and weights == weights  # NaN: the objective takes no importance weights
    return AnswerUse(
        kept=int(kept),
        weight=weights / kept if known else None,
        clipped=int(clipped),
        truncated=int(truncated),
        ratio=ratios / tokens if tokens else 0.0,
        each=each,
    )

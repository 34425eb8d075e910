"""Objectives made for text that another or an older policy sampled. Pure functions; notation as in `ObjectiveConfig`.

| name | source | what it does about the distance |
|---|---|---|
| m2po | arXiv 2510.01161; AReaL `actor.py` | drops the tokens of largest (log b - log prox)^2 until the mean is below tau |
| gepo | arXiv 2508.17850 (HeteroRL) | divides by an expectation over the group instead of by an answer's own likelihood |
| vespo | arXiv 2602.10693; TRL `loss_type="vespo"` | weighs an answer by e^l w^k e^(-l w), largest near w = 1, with w its ratio |
| oapl | arXiv 2602.19362 | no ratio: regresses log p - log b on the advantage |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_LOG_WEIGHT = math.log(1e-8)
"""Of vespo's ratio, as in its authors' implementation."""


def m2_keep(differences: Tensor, threshold: float) -> Tensor:
    """(N,) bool: which of N tokens stay, so that the mean of the squared `differences` (N,) of those is below `threshold`.

    The largest are dropped first. The smallest always stays. What is not finite is dropped, and counts in no mean.

    Example: squares 0.01, 0.02 and 1.0 with a threshold of 0.04: the first two stay (their mean is 0.015).
    """
    squares = differences.detach().square()
    finite = torch.isfinite(squares)
    order = torch.argsort(torch.where(finite, squares, torch.inf), stable=True)
    ordered = squares[order][: int(finite.sum())]
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # In ascending order the mean of the first n never falls, so that those below the threshold come first.
    count = max(int((means < threshold).sum()), min(1, len(ordered)))
    keep = torch.zeros_like(finite)
    keep[order[:count]] = True
    return keep


def gepo_log_expectation(mean_logprobs: Sequence[float]) -> float:
    """log( sum q^2 / sum q ) with q = exp(mean logprob) of each of a group's answers under its author; NaN for none.

    It is what q is expected to be over the group when answers are drawn in proportion to q.
    """
    if not mean_logprobs:
        return math.nan
    logs = torch.tensor(list(mean_logprobs), dtype=torch.float64)
    return float(torch.logsumexp(2.0 * logs, 0) - torch.logsumexp(logs, 0))


def gepo_log_ratio(logprobs: Tensor, log_denominators: Tensor, mask: Tensor) -> Tensor:
    """(N, 1) log of `exp(mean logprob) / expectation over the group`, with gradient; 0 in value where nothing is known (NaN)."""
    means = (logprobs * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return (means - torch.where(torch.isnan(log_denominators), means.detach(), log_denominators)).unsqueeze(1)


def vespo_weight(
    log_ratios: Tensor, advantages: Tensor, positive: tuple[float, float], negative: tuple[float, float], log_ratio_bound: float
) -> Tensor:
    """(N, 1) `e^l w^k e^(-l w)`, detached, with w the product of a sequence's ratios and (k, l) by the advantage's sign.

    log_ratios: (N, T), 0 on padding. advantages: (N, 1). It is 1 where w is 1.
    """
    log_weight = log_ratios.detach().sum(dim=1, keepdim=True).clamp(LEAST_LOG_WEIGHT, log_ratio_bound)
    gains = advantages >= 0
    power, rate = (torch.where(gains, positive[place], negative[place]).to(log_weight.dtype) for place in (0, 1))
    return (rate + power * log_weight - rate * log_weight.exp()).exp()


def oapl_loss(log_ratios: Tensor, advantages: Tensor, scale: float) -> Tensor:
    """(N, 1) `(scale * sum of a sequence's log ratios - advantage)^2`; its gradient vanishes where the policy is the optimal one.

    log_ratios: (N, T) log p - log b, 0 on padding. advantages: (N, 1), reward minus the group's soft value
    (`services.trainer.objectives.advantages.soft_value`).
    """
    return (scale * log_ratios.sum(dim=1, keepdim=True) - advantages).square()

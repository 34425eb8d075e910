"""GEPO (arXiv 2508.17850, section 3; HeteroRL's `learner_script_checkpoint.py`): the clipped
surrogate of a sequence whose ratio divides by an expectation over the group.

r = exp(mean lp) / (sum q^2 / sum q) over the group, with q = exp(mean log b) of each answer,
instead of dividing by the answer's own q. A = r - mean: its authors train without a division.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.trainer.objectives.base import LOG_RATIO_BOUND, Loss, LossTerms, Objective, clipped


def gepo_log_expectation(mean_logprobs: Sequence[float]) -> float:
    """log( sum q^2 / sum q ) with q = exp(mean logprob) of each of a group's answers under its
    sender's policy; NaN without answers.

    This is the expectation of q over the group if answers are drawn in proportion to q.
    """
    if not mean_logprobs:
        return math.nan
    return _log_sum_exp([2.0 * each for each in mean_logprobs]) - _log_sum_exp(mean_logprobs)


def _log_sum_exp(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))


def _loss(terms: LossTerms) -> Loss:
    means = (terms.logprobs * terms.mask).sum(dim=1) / terms.mask.sum(dim=1).clamp(min=1)
    known = (
        means.detach()
        if terms.log_expectation is None
        else means.detach().where(terms.log_expectation.isnan(), terms.log_expectation)
    )
    log_ratio = (means - known).unsqueeze(1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return clipped(terms, log_ratio.expand_as(terms.log_ratio).exp())


OBJECTIVE = Objective(
    name="gepo",
    loss=_loss,
    aggregation="sequence_mean",
    scale="none",
    clips=True,
    clip=(0.2, 0.2),
    counts_uninformative=True,
    moves_at_once=True,
    uses_behaviour=True,
    uses_group_likelihood=True,
)

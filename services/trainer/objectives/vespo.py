"""VESPO (arXiv 2602.10693; its authors' `recipe/vespo`; TRL's `loss_type="vespo"`): `-sg[e^l w^k
e^(-l w)] A lp`, w = exp(sum (lp - log b)) of the sequence.

The weight is 1 at w = 1 and falls on both sides; k and l are the options
`positive_power` and `positive_rate`, or `negative_...`, by the advantage's sign.
"""

from __future__ import annotations

import math

from services.trainer.objectives.base import LOG_RATIO_BOUND, Loss, LossTerms, Objective

LEAST_LOG_WEIGHT = math.log(1e-8)
"""Smallest log weight of a sequence, as in the authors' implementation."""


def _loss(terms: LossTerms) -> Loss:
    advantage = terms.advantage
    log_weight = terms.from_behaviour().detach().sum(dim=1, keepdim=True).clamp(LEAST_LOG_WEIGHT, LOG_RATIO_BOUND)
    gains = advantage >= 0
    power, rate = (
        log_weight.new_full(gains.shape, terms.option(f"positive_{name}")).where(gains, terms.option(f"negative_{name}"))
        for name in ("power", "rate")
    )
    weight = (rate + power * log_weight - rate * log_weight.exp()).exp()
    return Loss(-weight * advantage * terms.logprobs, terms.log_ratio.exp(), terms.mask.new_zeros(terms.mask.shape))


OBJECTIVE = Objective(
    name="vespo",
    loss=_loss,
    aggregation="token_mean",
    uses_behaviour=True,
    counts_uninformative=True,
    options={"positive_power": 2.0, "positive_rate": 3.0, "negative_power": 3.0, "negative_rate": 2.0},
)

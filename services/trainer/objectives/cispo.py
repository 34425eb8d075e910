"""CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): `-sg[clamp(r, min, max)] A lp`, so that a
clamped token keeps its gradient; a mean over all tokens, with DAPO's dynamic sampling.

The bounds apply to the ratio itself, not to its distance from 1; implementations differ in this.
No lower bound as in TRL, and 5 as in ScaleRL.
"""

from __future__ import annotations

from services.trainer.objectives.base import Loss, LossTerms, Objective


def _loss(terms: LossTerms) -> Loss:
    ratio, low, high = terms.log_ratio.exp(), terms.option("min"), terms.option("max")
    weight = ratio.detach().clamp(low, high)
    return Loss(-weight * terms.advantage * terms.logprobs, ratio, (ratio < low) | (ratio > high))


OBJECTIVE = Objective(name="cispo", loss=_loss, aggregation="token_mean", options={"min": 0.0, "max": 5.0})

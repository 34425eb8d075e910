"""CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): `-sg[clamp(r, cispo_min, cispo_max)] A lp`,
so that a clamped token keeps its gradient; a mean over all tokens, with DAPO's dynamic sampling.

The bounds apply to the ratio itself, not to its distance from 1; implementations differ in this.
"""

from __future__ import annotations

from services.trainer.objectives.base import Loss, LossTerms, Objective


def _loss(terms: LossTerms) -> Loss:
    settings, ratio = terms.settings, terms.log_ratio.exp()
    weight = ratio.detach().clamp(settings.cispo_min, settings.cispo_max)
    clamped = (ratio < settings.cispo_min) | (ratio > settings.cispo_max)
    return Loss(-weight * terms.advantage * terms.logprobs, ratio, clamped)


OBJECTIVE = Objective(name="cispo", loss=_loss, aggregation="token_mean", settings=("cispo_min", "cispo_max"))

"""GSPO (arXiv 2507.18071, eqs. 5 to 7, section 5.1): the clipped surrogate, with r the geometric
mean of a sequence's ratios. That ratio hardly moves, so it is clipped at 3e-4 and 4e-4.
"""

from __future__ import annotations

from services.trainer.objectives.base import Loss, LossTerms, Objective, clipped


def _loss(terms: LossTerms) -> Loss:
    lengths = terms.mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = terms.log_ratio.sum(dim=1, keepdim=True) / lengths
    return clipped(terms, mean.expand_as(terms.log_ratio).exp())


OBJECTIVE = Objective(
    name="gspo", loss=_loss, aggregation="sequence_mean", clips=True, clip=(3e-4, 4e-4), counts_uninformative=True
)

"""M2PO (arXiv 2510.01161, section 5.2, Algorithm 1): `-M r A` with r the ratio to the policy that
sampled, a mean over all tokens, masked ones included.

M masks only tokens that a trust region is about, those with A > 0 and r > 1 or A < 0 and r < 1:
those with the largest (log r)^2 until the mean over the rest of them is at most `threshold`.
Nothing is clipped. AReaL's `m2po` is another loss: it masks tokens of either sign and clips.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.trainer.objectives.base import Loss, LossTerms, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from shared.config.trainer_section import ObjectiveSection


def m2_keep(log_ratios: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """(N,) bool: which of an update's N tokens have a loss. log_ratios: (N,) log of policy to
    behaviour. advantages: (N,).

    Example: with A = 1 and a threshold of 0.04, log ratios 0.1, 0.15 and 1 keep the first two (the
    mean of their squares is 0.016); -3 would stay, as the step makes that token likelier.
    """
    log_ratios = log_ratios.detach()
    constrained = (log_ratios * advantages > 0).nonzero().squeeze(1)
    squares = log_ratios[constrained].square()
    order = squares.argsort(stable=True)
    # In ascending order the mean of the first n never decreases, so those within the threshold come
    # first.
    means = squares[order].cumsum(0) / squares.new_ones(len(order)).cumsum(0)
    masked = constrained[order[int((means <= threshold).sum()) :]]
    keep = log_ratios.isfinite()
    keep[masked] = False
    return keep


def _keeps(log_ratios: Tensor, advantages: Tensor, settings: ObjectiveSection) -> Tensor:
    return m2_keep(log_ratios, advantages, float(settings.objective_options["threshold"]))


def _loss(terms: LossTerms) -> Loss:
    ratio = terms.from_behaviour().exp()
    return Loss(-ratio * terms.advantage, ratio, terms.mask.new_zeros(terms.mask.shape))


OBJECTIVE = Objective(
    name="m2po",
    loss=_loss,
    aggregation="token_mean",
    moves_at_once=True,
    uses_behaviour=True,
    counts_uninformative=True,
    keeps=_keeps,
    options={"threshold": 0.04},
)

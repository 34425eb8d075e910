"""M2PO (arXiv 2510.01161; AReaL's `actor.py`): DAPO's loss without the tokens furthest from the
policy that sampled them.

Over the whole step, the tokens with the largest (log b - log prox)^2 are dropped until the mean of
the rest is below `m2_threshold`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.trainer.objectives.base import Objective
from services.trainer.objectives.surrogate import clipped_loss

if TYPE_CHECKING:
    from torch import Tensor

    from shared.config.objective_section import ObjectiveSection


def m2_keep(differences: Tensor, threshold: float) -> Tensor:
    """(N,) bool: which of N tokens stay, so that the mean of the squared `differences` (N,) of
    those is below `threshold`.

    The largest are dropped first. The smallest always stays. Values that are not finite are dropped
    and count in no mean.

    Example: squares 0.01, 0.02 and 1.0 with a threshold of 0.04: the first two stay (their mean is
    0.015).
    """
    squares = differences.detach().square()
    finite = squares.isfinite()
    order = squares.where(finite, float("inf")).argsort(stable=True)
    ordered = squares[order][: int(finite.sum())]
    means = ordered.cumsum(0) / (ordered.new_ones(len(ordered)).cumsum(0))
    # In ascending order the mean of the first n never decreases, so those below the threshold come
    # first.
    count = max(int((means < threshold).sum()), min(1, len(ordered)))
    keep = finite.new_zeros(finite.shape)
    keep[order[:count]] = True
    return keep


def _keeps(differences: Tensor, settings: ObjectiveSection) -> Tensor:
    return m2_keep(differences, settings.m2_threshold)


OBJECTIVE = Objective(
    name="m2po", loss=clipped_loss, aggregation="token_mean", clips=True, keeps=_keeps, settings=("m2_threshold",)
)

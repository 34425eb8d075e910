"""The clipped surrogate that most objectives share,
`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, and the plain `-A lp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.trainer.objectives.base import Loss, LossTerms

if TYPE_CHECKING:
    from torch import Tensor


def clipped_loss(terms: LossTerms) -> Loss:
    """The clipped loss with r the token's own ratio to the proximal policy."""
    return clipped(terms, terms.log_ratio.exp())


def clipped(terms: LossTerms, ratio: Tensor) -> Loss:
    """The clipped loss with any `ratio` (N, T). If A < 0, the loss is at most `dual_clip` times |A|
    (arXiv 1912.09729).
    """
    settings, advantage = terms.settings, terms.advantage
    assert settings.clip_low is not None and settings.clip_high is not None, "`ConfiguredObjective` fills them in"
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    loss = -(ratio * advantage).minimum(ratio.clamp(low, high) * advantage)
    cut = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
    if settings.dual_clip:
        loss = loss.minimum(-settings.dual_clip * advantage).where(advantage < 0, loss)
        cut = cut | ((ratio > settings.dual_clip) & (advantage < 0))
    return Loss(loss, ratio, cut)


def plain_loss(terms: LossTerms) -> Loss:
    """`-A lp`, without clipping."""
    return Loss(-terms.advantage * terms.logprobs, terms.log_ratio.exp(), terms.mask.new_zeros(terms.mask.shape))

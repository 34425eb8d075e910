"""Tapered REINFORCE: the less likely a bad answer has become, the less it is pushed down (after
TOPR, arXiv 2503.14286).

The loss is `-w A lp`. For A >= 0, w is 1. For A < 0, w is the ratio to the policy at the arrival of
the batch, clamped to `floor` and 1. This matters from the second update on a batch; in the first
one the ratio is 1.

    [trainer]
    objective = "tapered"
    objective_options = { floor = 0.1 }
    updates_per_batch = 2
"""

from __future__ import annotations

from collections.abc import Sequence

from services.trainer.objectives.base import Loss, LossTerms, Objective


def loss(terms: LossTerms) -> Loss:
    """Loss of each token, its ratio, and whether its weight was clamped."""
    floor = float(terms.settings.objective_options.get("floor", 0.0))
    ratio = terms.log_ratio.exp()
    weight = ratio.detach().clamp(floor, 1.0).where(terms.advantage < 0, 1.0)
    clamped = (terms.advantage < 0) & (weight != ratio.detach())
    return Loss(-weight * terms.advantage * terms.logprobs, ratio, clamped)


def centred(rewards: Sequence[float]) -> list[float]:
    """Rewards minus their mean, without a division."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


OBJECTIVE = Objective(name="tapered", loss=loss, aggregation="token_mean", advantages=centred)

"""RLOO (arXiv 2402.14740, section 3.2): `-A lp` summed over each answer, a mean over answers; A is
the reward minus the mean of the other answers' rewards.
"""

from __future__ import annotations

from services.trainer.objectives.base import Objective, plain_loss

OBJECTIVE = Objective(
    name="rloo",
    loss=plain_loss,
    aggregation="sequence_sum",
    advantages="leave_one_out",
    counts_uninformative=True,
    differs="its paper subtracts the divergence to the base policy from the reward; trainer.kl_coefficient adds it to the loss",
)

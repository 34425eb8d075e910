"""REINFORCE (Williams 1992, Machine Learning 8, section 4): `-A lp` summed over each answer, a mean
over answers; A = r - mean of the group, its baseline.
"""

from __future__ import annotations

from services.trainer.objectives.base import Objective, plain_loss

OBJECTIVE = Objective(name="reinforce", loss=plain_loss, aggregation="sequence_sum", scale="none", counts_uninformative=True)

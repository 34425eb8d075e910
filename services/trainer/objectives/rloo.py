"""RLOO (arXiv 2402.14740): `-A lp`, with A the reward minus the mean of the other completions'."""

from __future__ import annotations

from services.trainer.objectives.base import Objective
from services.trainer.objectives.surrogate import plain_loss

OBJECTIVE = Objective(name="rloo", loss=plain_loss, aggregation="token_mean", advantages="leave_one_out")

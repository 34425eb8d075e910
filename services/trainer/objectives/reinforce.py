"""REINFORCE: `-A lp`, a mean over all tokens of the batch."""

from __future__ import annotations

from services.trainer.objectives.base import Objective
from services.trainer.objectives.surrogate import plain_loss

OBJECTIVE = Objective(name="reinforce", loss=plain_loss, aggregation="token_mean")

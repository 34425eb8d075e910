"""DAPO (arXiv 2503.14476): the clipped surrogate, a mean over all tokens of the batch."""

from __future__ import annotations

from services.trainer.objectives.base import Objective
from services.trainer.objectives.surrogate import clipped_loss

OBJECTIVE = Objective(name="dapo", loss=clipped_loss, aggregation="token_mean", clips=True)

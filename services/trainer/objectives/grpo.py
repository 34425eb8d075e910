"""Group relative policy optimization (arXiv 2402.03300): the clipped surrogate, a mean of the
sequences' means.
"""

from __future__ import annotations

from services.trainer.objectives.base import Objective
from services.trainer.objectives.surrogate import clipped_loss

OBJECTIVE = Objective(name="grpo", loss=clipped_loss, aggregation="sequence_mean", clips=True, counts_uninformative=True)

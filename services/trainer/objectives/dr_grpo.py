"""Dr. GRPO (arXiv 2503.20783): the clipped surrogate, divided by a constant length, so that the
tokens of long answers do not count less.
"""

from __future__ import annotations

from services.trainer.objectives.base import Objective
from services.trainer.objectives.surrogate import clipped_loss

OBJECTIVE = Objective(name="dr_grpo", loss=clipped_loss, aggregation="fixed_length", clips=True)

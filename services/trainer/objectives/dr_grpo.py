"""Dr. GRPO (arXiv 2503.20783, section 3.2): GRPO without its two divisions. The loss is divided by
a constant length, so that the tokens of long answers do not count less, and A = r - mean, so that
groups with little spread do not count more.
"""

from __future__ import annotations

from services.trainer.objectives.base import Objective, clipped_loss

OBJECTIVE = Objective(
    name="dr_grpo",
    loss=clipped_loss,
    aggregation="fixed_length",
    scale="none",
    clips=True,
    clip=(0.2, 0.2),
    counts_uninformative=True,
)

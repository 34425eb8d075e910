"""Group relative policy optimization (DeepSeekMath, arXiv 2402.03300, eq. 3 and section 4.1.2): the
clipped surrogate, a mean of the sequences' means over all groups; A = (r - mean) / std.
"""

from __future__ import annotations

from services.trainer.objectives.base import Objective, clipped_loss

OBJECTIVE = Objective(
    name="grpo",
    loss=clipped_loss,
    aggregation="sequence_mean",
    clips=True,
    clip=(0.2, 0.2),
    counts_uninformative=True,
    differs="its paper also adds 0.04 times the divergence to the base policy: set trainer.kl_coefficient = 0.04 for that",
)

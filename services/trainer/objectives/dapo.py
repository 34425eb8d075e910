"""DAPO (arXiv 2503.14476, eq. 8, sections 3.1 to 3.3): the clipped surrogate with a higher upper
bound, a mean over all tokens of the groups whose rewards differ (dynamic sampling).
"""

from __future__ import annotations

from services.trainer.objectives.base import Objective, clipped_loss

OBJECTIVE = Objective(name="dapo", loss=clipped_loss, aggregation="token_mean", clips=True, clip=(0.2, 0.28))

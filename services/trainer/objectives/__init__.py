"""Policy-gradient objectives as pure functions over tensors: loss per token, weights that aggregate it, sums for stats.
No model, optimiser or configuration file is known here; `services.trainer.gradient.update` puts these to work.
"""

from services.trainer.objectives.aggregation import Normaliser, token_weights
from services.trainer.objectives.config import Aggregation, ObjectiveConfig, ObjectiveName
from services.trainer.objectives.sums import LossSums
from services.trainer.objectives.token_loss import TokenLoss, k3_divergence, token_loss

__all__ = [
    "Aggregation",
    "LossSums",
    "Normaliser",
    "ObjectiveConfig",
    "ObjectiveName",
    "TokenLoss",
    "k3_divergence",
    "token_loss",
    "token_weights",
]

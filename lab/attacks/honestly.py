"""Groups as they were sampled: what a node of another policy or temperature sends, and a sleeper
until it wakes.
"""

from __future__ import annotations

from lab.attacks.view import Hostile
from shared.contracts.messages import RolloutGroup


def as_sampled(view: Hostile) -> list[RolloutGroup]:
    """Everything, unchanged."""
    return [group for group, _ in view.made]

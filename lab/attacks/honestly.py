"""Unmodified groups, sent by nodes with another policy or temperature, and by a sleeper before it
attacks.
"""

from __future__ import annotations

from lab.attacks.view import Hostile
from shared.contracts.messages import RolloutGroup


def as_sampled(view: Hostile) -> list[RolloutGroup]:
    """All groups, unchanged."""
    return [group for group, _ in view.made]

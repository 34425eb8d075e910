"""All alerts and all recording rules, whatever their groups."""

from __future__ import annotations

from monitoring.rules import GROUPS
from monitoring.rules.base import Alert, Record


def alerts() -> tuple[Alert, ...]:
    """All alerts; two alerts may share a name if their severities differ."""
    return tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, Alert))


def records() -> tuple[Record, ...]:
    """All recording rules."""
    return tuple(rule for group in GROUPS for rule in group.rules if isinstance(rule, Record))

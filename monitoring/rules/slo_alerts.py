"""Service levels, as burn rates: how fast a node uses up the time in which it may fail.

Two promises, each of 99 % of the minutes: the node learns (`node:swarm_learns:bool`), and the node
shares (`node:swarm_shares:bool`). Windows and factors are those of the Google SRE workbook, chapter
5: a critical alert where 2 % of a month's budget goes in an hour, a warning where 5 % goes in six.
The short window ends an alert soon after its cause.
"""

from __future__ import annotations

from monitoring.rules.base import NODE_DASHBOARD, SWARM_DASHBOARD, Alert, Severity

TARGET = 0.99
_FAST, _SLOW = 14.4, 6.0


def _burns(level: str, long: str, short: str, known: str, factor: float) -> str:
    """True where more than `factor` times the allowed part of both windows was bad. Only of a node
    that is there now, and was `known` ago: a run that is over burns nothing, and of one that has
    just begun the start would be most of the window.
    """
    bad = f"{factor * (1 - TARGET):g}"
    there = f"({level} and {level} offset {known})"
    return f"(1 - avg_over_time({level}[{long}])) > {bad}\nand\n(1 - avg_over_time({level}[{short}])) > {bad}\nand\n{there}"


def _pair(name: str, level: str, what: str, dashboard: str) -> tuple[Alert, Alert]:
    """A fast and a slow burn of one objective. Two windows each: the long one so that a short
    outage wakes nobody, the short one so that the alert ends soon after its cause.
    """
    summary = f"{{{{ $labels.node }}}} has not {what} for {{{{ $value | humanizePercentage }}}} of the time"
    description = (
        f"In the window that this alert looks at, {{{{ $labels.node }}}} has not {what} for "
        "{{ $value | humanizePercentage }} of the time; 1% is what a node may take over a month. The alert that names the cause "
        "fires beside this one, or has come and gone."
    )
    fast = Alert(
        name=name,
        expr=_burns(level, "1h", "5m", "30m", _FAST),
        hold="2m",
        severity=Severity.CRITICAL,
        summary=summary,
        description=description,
        dashboard=dashboard,
    )
    slow = Alert(
        name=name,
        expr=_burns(level, "6h", "30m", "3h", _SLOW),
        hold="15m",
        severity=Severity.WARNING,
        summary=summary,
        description=description,
        dashboard=dashboard,
    )
    return fast, slow


RULES: tuple[Alert, ...] = (
    *_pair("SwarmLearningBudgetBurns", "node:swarm_learns:bool", "learned", NODE_DASHBOARD),
    *_pair("SwarmSharingBudgetBurns", "node:swarm_shares:bool", "shared", SWARM_DASHBOARD),
)

"""Service level alerts, as burn rates: how fast a node uses up its error budget.

There are two objectives, each for 99 % of the minutes: the node learns (`node:swarm_learns:bool`)
and the node shares (`node:swarm_shares:bool`). Windows and factors are those of the Google SRE
workbook, chapter 5: critical if 2 % of a month's budget is used in an hour, a warning if 5 % is
used in six hours. The short window ends an alert soon after its cause ends.
"""

from __future__ import annotations

from monitoring.rules.base import NODE_DASHBOARD, SWARM_DASHBOARD, Alert, Severity

TARGET = 0.99
_FAST, _SLOW = 14.4, 6.0


def _burns(level: str, long: str, short: str, known: str, factor: float) -> str:
    """True if more than `factor` times the allowed share of both windows was bad. The node must
    exist now and have existed `known` ago: a finished run burns no budget, and for a run that has
    just begun, start-up would fill most of the window.
    """
    bad = f"{factor * (1 - TARGET):g}"
    there = f"({level} and {level} offset {known})"
    return f"(1 - avg_over_time({level}[{long}])) > {bad}\nand\n(1 - avg_over_time({level}[{short}])) > {bad}\nand\n{there}"


def _pair(name: str, level: str, what: str, dashboard: str) -> tuple[Alert, Alert]:
    """The fast and the slow alert on one objective. Each uses two windows: the long one so that a
    short outage wakes nobody, the short one so that the alert ends soon after its cause ends.
    """
    summary = f"{{{{ $labels.node }}}} has not {what} for {{{{ $value | humanizePercentage }}}} of the time"
    description = (
        f"In this alert's window {{{{ $labels.node }}}} has not {what} for {{{{ $value | humanizePercentage }}}} of the time; "
        "1% is the budget for a month. An alert that names the cause is firing too, or has fired and ended."
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

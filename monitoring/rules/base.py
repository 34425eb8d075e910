"""The parts of a rule, and how a rule file for Prometheus expresses them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

RUNBOOKS = "docs/runbooks"
"""The default for `runbook_url`: the folder in this repository."""


class Severity(StrEnum):
    """Who has to act, and when."""

    CRITICAL = "critical"
    """A person, now: a node has stopped learning or is about to."""
    WARNING = "warning"
    """A person, in working hours."""
    NONE = "none"
    """Nobody; a machine that monitors the alerting uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A recording rule; `name` is `level:metric:operations`."""

    name: str
    expr: str

    def as_object(self, runbooks: str, scale: float = 1.0) -> dict[str, Any]:
        """The rule as an object of a rule file. `scale` has no effect on a recording rule."""
        return {"record": self.name, "expr": _expression(self.expr)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert. `hold` is Prometheus's `for`; `summary` and `description` are its templates;
    `dashboard` is a path in Grafana.

    `soon`: the alert fires sooner on one machine. Its hold, its windows and the values in
    `$seconds(n)` are multiplied by the scale that rules are rendered with, so its texts must not
    state them.
    """

    name: str
    expr: str
    hold: str
    severity: Severity
    summary: str
    description: str
    dashboard: str
    soon: bool = False

    def as_object(self, runbooks: str, scale: float = 1.0) -> dict[str, Any]:
        """The rule as an object of a rule file."""
        scale = scale if self.soon else 1.0
        hold = _scaled(self.hold, scale)
        return {
            "alert": self.name,
            "expr": _scaled_expression(_expression(self.expr), scale),
            **({"for": hold} if hold else {}),
            "labels": {"severity": self.severity.value},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbooks.rstrip('/')}/{self.name}.md",
                "dashboard": self.dashboard,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rules that are evaluated in order, so that later ones can use what earlier ones record."""

    name: str
    rules: tuple[Record | Alert, ...]

    def as_object(self, runbooks: str, scale: float = 1.0, every: str = "") -> Mapping[str, Any]:
        """The group as an object of a rule file. `every`: how often it is evaluated; empty: as
        often as that Prometheus does by default.
        """
        interval = {"interval": every} if every else {}
        return {"name": self.name, **interval, "rules": [rule.as_object(runbooks, scale) for rule in self.rules]}


NODE_DASHBOARD = "/d/swarm-node?var-node={{ $labels.node }}"
SWARM_DASHBOARD = "/d/swarm-overview?var-node={{ $labels.node }}"
NATS_DASHBOARD = "/d/swarm-nats"


def by_node(function: str, inner: str) -> str:
    """`inner` aggregated by node: `max by (job, node) (...)`."""
    return f"{function} by (job, node) ({inner})"


def _expression(expr: str) -> str:
    return "\n".join(line.strip() for line in expr.strip().splitlines())


def _scaled_expression(expr: str, scale: float) -> str:
    """`expr` with windows in minutes and `$seconds(n)` multiplied by `scale`. Windows in hours or
    days say how long something is remembered, and stay as they are.
    """
    expr = re.sub(r"\$seconds\((\d+)\)", lambda found: f"{float(found[1]) * scale:g}", expr)
    return re.sub(r"\[(\d+m)\]", lambda found: f"[{_scaled(found[1], scale)}]", expr)


def _scaled(duration: str, scale: float) -> str:
    """A duration such as `5m` multiplied by `scale`, then in milliseconds because it may not be
    whole minutes.
    """
    found = re.fullmatch(r"(\d+)m", duration)
    return duration if not found or scale == 1.0 else f"{round(int(found[1]) * 60_000 * scale)}ms"

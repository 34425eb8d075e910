"""What a rule is made of, and how Prometheus writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

RUNBOOKS = "docs/runbooks"
"""Where `runbook_url` points unless rendering is told a URL: the folder in this repository."""


class Severity(StrEnum):
    """Who looks, and when."""

    CRITICAL = "critical"
    """A person, now: a node has stopped to learn or is about to."""
    WARNING = "warning"
    """A person, in working hours."""
    NONE = "none"
    """Nobody; for machines that watch the alerting itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A recording rule; `name` is `level:metric:operations`."""

    name: str
    expr: str

    def as_object(self, runbooks: str, scale: float = 1.0) -> dict[str, Any]:
        """As in a rule file. What is recorded is the same at every scale."""
        return {"record": self.name, "expr": _expression(self.expr)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert. `hold` is Prometheus's `for`; `summary` and `description` are its templates;
    `dashboard` is a path in Grafana.

    `soon`: on one machine it is told sooner. Its hold, its windows and what stands in `$seconds(n)`
    are multiplied by the scale that rules are rendered with, so its texts name none of them.
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
        """As in a rule file."""
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
    """Rules that are evaluated one after the other, so that later ones see what earlier ones
    record.
    """

    name: str
    rules: tuple[Record | Alert, ...]

    def as_object(self, runbooks: str, scale: float = 1.0, every: str = "") -> Mapping[str, Any]:
        """As in a rule file. `every`: how often it is evaluated, whatever the Prometheus's usual
        interval is.
        """
        interval = {"interval": every} if every else {}
        return {"name": self.name, **interval, "rules": [rule.as_object(runbooks, scale) for rule in self.rules]}


NODE_DASHBOARD = "/d/swarm-node?var-node={{ $labels.node }}"
SWARM_DASHBOARD = "/d/swarm-overview?var-node={{ $labels.node }}"
NATS_DASHBOARD = "/d/swarm-nats"


def by_node(function: str, inner: str) -> str:
    """`inner` brought together by node: `max by (job, node) (...)`."""
    return f"{function} by (job, node) ({inner})"


def _expression(expr: str) -> str:
    return "\n".join(line.strip() for line in expr.strip().splitlines())


def _scaled_expression(expr: str, scale: float) -> str:
    """Windows shorter than a quarter of a day, and `$seconds(n)`, at a scale. A day's window says
    how long something is remembered, and stays.
    """
    expr = re.sub(r"\$seconds\((\d+)\)", lambda found: f"{float(found[1]) * scale:g}", expr)
    return re.sub(r"\[(\d+m)\]", lambda found: f"[{_scaled(found[1], scale)}]", expr)


def _scaled(duration: str, scale: float) -> str:
    """A duration such as `5m` at a scale, in milliseconds where it is no whole one."""
    found = re.fullmatch(r"(\d+)m", duration)
    return duration if not found or scale == 1.0 else f"{round(int(found[1]) * 60_000 * scale)}ms"

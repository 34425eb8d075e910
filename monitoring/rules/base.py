"""What a rule is made of, and how Prometheus writes it."""

from __future__ import annotations

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

    def as_object(self, runbooks: str) -> dict[str, Any]:
        """As in a rule file."""
        return {"record": self.name, "expr": _expression(self.expr)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert. `hold` is Prometheus's `for`; `summary` and `description` are its templates;
    `dashboard` is a path in Grafana.
    """

    name: str
    expr: str
    hold: str
    severity: Severity
    summary: str
    description: str
    dashboard: str

    def as_object(self, runbooks: str) -> dict[str, Any]:
        """As in a rule file."""
        return {
            "alert": self.name,
            "expr": _expression(self.expr),
            **({"for": self.hold} if self.hold else {}),
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

    def as_object(self, runbooks: str) -> Mapping[str, Any]:
        """As in a rule file."""
        return {"name": self.name, "rules": [rule.as_object(runbooks) for rule in self.rules]}


NODE_DASHBOARD = "/d/swarm-node?var-node={{ $labels.node }}"
SWARM_DASHBOARD = "/d/swarm-overview?var-node={{ $labels.node }}"
NATS_DASHBOARD = "/d/swarm-nats"


def by_node(function: str, inner: str) -> str:
    """`inner` brought together by node: `max by (job, node) (...)`."""
    return f"{function} by (job, node) ({inner})"


def _expression(expr: str) -> str:
    return "\n".join(line.strip() for line in expr.strip().splitlines())

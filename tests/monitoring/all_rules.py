"""All alerts and all recording rules of the committed file, whatever their groups."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from monitoring.rules import RULES


@dataclass(frozen=True)
class Alert:
    """An alert; two may share a name if their severities differ."""

    name: str
    expr: str
    hold: str
    severity: str
    annotations: dict[str, str]


@dataclass(frozen=True)
class Record:
    """A recording rule."""

    name: str
    expr: str


def groups() -> list[dict[str, object]]:
    return list(yaml.safe_load(RULES.read_text())["groups"])


def alerts() -> tuple[Alert, ...]:
    """All alerts."""
    return tuple(
        Alert(rule["alert"], rule["expr"], rule.get("for", ""), rule["labels"]["severity"], rule["annotations"])
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    )


def records() -> tuple[Record, ...]:
    """All recording rules."""
    return tuple(
        Record(rule["record"], rule["expr"])
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule
    )

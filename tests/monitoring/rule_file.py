"""The rules for a test on one machine: the committed ones, with shorter waiting times."""

from __future__ import annotations

import re
from typing import Any

import yaml

from monitoring.rules import RULES

_SOON = frozenset(
    {
        "SwarmTrainerStalled",
        "SwarmWritesFailing",
        "SwarmHeldOutBelowBase",
        "SwarmPolicyDiverges",
        "SwarmFlood",
        "SwarmRoleMissing",
        "SwarmStreamsLost",
        "TargetDown",
        "NatsDown",
    }
)
"""Alerts that `rule_file` makes fire sooner."""


def rule_file(scale: float = 1.0) -> str:
    """The rules for one machine, where somebody is watching: evaluated as often as that Prometheus
    does by default, with the waiting times in minutes of the urgent alerts multiplied by `scale`.
    """
    found = yaml.safe_load(RULES.read_text())
    for group in found["groups"]:
        del group["interval"]
        for rule in group["rules"]:
            if rule.get("alert") in _SOON:
                _scale(rule, scale)
    return yaml.safe_dump(found, sort_keys=False, width=10_000)


def _scale(rule: dict[str, Any], scale: float) -> None:
    """Windows in hours or days say how long something is remembered, and stay as they are."""

    def scaled(found: re.Match[str]) -> str:
        return f"{found[1]}{round(int(found[2]) * 60_000 * scale)}ms{found[3]}"

    if scale != 1.0:
        rule["for"] = re.sub(r"^()(\d+)m()$", scaled, rule["for"])
        rule["expr"] = re.sub(r"(\[)(\d+)m(\])", scaled, rule["expr"])
        rule["expr"] = rule["expr"].replace("seconds > 120)", f"seconds > {120 * scale:g})")

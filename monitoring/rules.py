"""The committed alerting rules: `python -m monitoring.rules` copies them to the object that
Prometheus' operator reads, and `rule_file` shortens their waiting times for one machine.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

COMPONENT = Path(__file__).resolve().parents[1] / "k8s" / "components" / "monitoring"
RULES = COMPONENT / "rules" / "swarm.yaml"
OPERATOR_OBJECT = COMPONENT / "prometheus-rule.yaml"
COMMAND = "python -m monitoring.rules"

_HEAD = f"""# Made by `{COMMAND}` from rules/swarm.yaml; change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: swarm
  labels:
    app.kubernetes.io/part-of: swarm
spec:
"""
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


def operator_object() -> str:
    """The rules as a PrometheusRule: the same text, indented below its head."""
    groups = RULES.read_text()[RULES.read_text().index("\ngroups:") + 1 :]
    return _HEAD + "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True))


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


if __name__ == "__main__":
    OPERATOR_OBJECT.write_text(operator_object())

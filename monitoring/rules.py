"""The committed alerting rules: `python -m monitoring.rules` copies them to the object that
Prometheus' operator reads.
"""

from __future__ import annotations

from pathlib import Path

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


def operator_object() -> str:
    """The rules as a PrometheusRule: the same text, indented below its head."""
    groups = RULES.read_text()[RULES.read_text().index("\ngroups:") + 1 :]
    return _HEAD + "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True))


if __name__ == "__main__":
    OPERATOR_OBJECT.write_text(operator_object())

"""Writes dashboards and rules to files for Grafana, Prometheus and Kubernetes. The files are
checked in, and a test fails if they are stale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from monitoring.dashboards import DASHBOARDS
from monitoring.grafana import as_json_model
from monitoring.rules import GROUPS
from monitoring.rules.base import RUNBOOKS

REPOSITORY = Path(__file__).resolve().parents[1]
COMPONENT = Path("k8s/components/monitoring")
EVERY = "30s"
"""How often a cluster's rules are evaluated. A Prometheus that was told nothing takes a minute. An
alert on what another group has recorded waits for two evaluations and begins its hold with the
second, so a stuck trainer would be told after up to five minutes instead of four.
"""
_HEADER = "# Made by `python -m monitoring render` from monitoring/rules; change it there.\n"


def rendered(runbooks: str = RUNBOOKS) -> dict[Path, str]:
    """File contents by path in the repository. `runbooks` is the URL of the folder of runbook
    pages.
    """
    groups = [group.as_object(runbooks, every=EVERY) for group in GROUPS]
    files = {
        COMPONENT / "dashboards" / f"{name}.json": json.dumps(as_json_model(dashboard), indent=1, ensure_ascii=False) + "\n"
        for name, dashboard in DASHBOARDS.items()
    }
    files[COMPONENT / "rules" / "swarm.yaml"] = rule_file(runbooks, every=EVERY)
    files[COMPONENT / "prometheus-rule.yaml"] = _HEADER + _yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "swarm", "labels": {"app.kubernetes.io/part-of": "swarm"}},
            "spec": {"groups": groups},
        }
    )
    return files


def rule_file(runbooks: str = RUNBOOKS, scale: float = 1.0, every: str = "") -> str:
    """All recording and alerting rules, as a file for Prometheus' `rule_files`. `scale` shortens
    the waiting times of alerts marked `Alert.soon`, for use on one machine. `every`: how often they
    are evaluated; empty: as often as that Prometheus does by default.
    """
    return _HEADER + _yaml({"groups": [group.as_object(runbooks, scale, every) for group in GROUPS]})


def write(folder: Path = REPOSITORY, runbooks: str = RUNBOOKS) -> list[Path]:
    """Write the files that differ below `folder`; returns their paths."""
    changed = []
    for path, text in rendered(runbooks).items():
        file = folder / path
        if file.exists() and file.read_text() == text:
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        changed.append(path)
    return changed


def stale(folder: Path = REPOSITORY) -> list[Path]:
    """Paths whose checked-in contents differ from what the code renders."""
    return [path for path, text in rendered().items() if not (folder / path).exists() or (folder / path).read_text() != text]


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks and uses no YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always true: equal parts are repeated in full."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(content: dict[str, Any]) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)

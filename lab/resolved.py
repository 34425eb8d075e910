"""Resolves an arm's settings: everything its runs depend on, with defaults filled in.

Defaults may change while a spec's text stays the same. Runs made with different defaults do not
belong to one arm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lab.arms import plan_run
from lab.spec import Spec

_BESIDE_THE_RUN = {"node", "nats", "policy_store", "http", "log"}
"""Sections that contain only a node's place and name."""
_MOST_NAMED = 3


def resolved_settings(spec: Spec, arm: str) -> dict[str, Any]:
    """For each kind of node, the number of nodes and all settings that affect the run; the same for
    all seeds.

    Raises:
        SpecError: a node's configuration cannot be used.
    """
    run = plan_run(spec, arm, 0)
    nodes: list[dict[str, Any]] = []
    for node in run.nodes:
        settings = {
            "role": node.role,
            **node.config.model_dump(mode="json", exclude=_BESIDE_THE_RUN),
        }
        if nodes and {**nodes[-1], "count": 1} == {**settings, "count": 1}:
            nodes[-1]["count"] += 1
        else:
            nodes.append({"count": 1, **settings})
    attack = run.attack.model_dump(mode="json")
    return {"rounds": run.rounds, "round_s": run.round_s, "delay_rounds": list(run.delay_rounds), "attack": attack, "nodes": nodes}


def settings_digest(settings: Mapping[str, Any]) -> str:
    """A digest of resolved settings in sixteen digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first settings that differ, for a message. A setting of several kinds of nodes is named
    once.
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    changed: dict[str, str] = {}
    for key in (*old, *(key for key in new if key not in old)):
        if old.get(key) != new.get(key) or (key in old) != (key in new):
            was = f"was {json.dumps(old[key])}" if key in old else "did not exist"
            becomes = f"is {json.dumps(new[key])}" if key in new else "no longer exists"
            name = key.split(".", 2)[2] if key.startswith("nodes.") else key
            changed.setdefault(name, f"{name} {was} and {becomes}")
    rest = len(changed) - _MOST_NAMED
    return "; ".join([*list(changed.values())[:_MOST_NAMED], *([f"and {rest} more"] if rest > 0 else [])])


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    elif name == "nodes":
        for place, part in enumerate(value):
            yield from _flat(part, f"nodes.{place}")
    else:
        yield name, value

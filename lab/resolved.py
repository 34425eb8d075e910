"""What an arm's runs depend on once everything it does not set is filled in.

Defaults change while a spec's text stays; runs made under two sets of defaults are not one arm's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lab.arms import plan_run
from lab.spec import Spec

_BESIDE_THE_RUN = {"node", "nats", "policy_store", "http", "log"}
"""Sections that say where a node is and what it is called."""
_MOST_NAMED = 3


def resolved_settings(spec: Spec, arm: str) -> dict[str, Any]:
    """Of each kind of node how many there are and all settings that bear on the run; the same for
    all seeds.

    Raises:
        SpecError: a node's configuration cannot be used.
    """
    run = plan_run(spec, arm, 0)
    nodes: list[dict[str, Any]] = []
    for node in run.nodes:
        settings = {
            "role": node.role,
            "local": node.local.model_dump(mode="json"),
            **node.config.model_dump(mode="json", exclude=_BESIDE_THE_RUN),
        }
        if nodes and {**nodes[-1], "count": 1} == {**settings, "count": 1}:
            nodes[-1]["count"] += 1
        else:
            nodes.append({"count": 1, **settings})
    attack = run.attack.model_dump(mode="json")
    return {"rounds": run.rounds, "round_s": run.round_s, "delay_rounds": list(run.delay_rounds), "attack": attack, "nodes": nodes}


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Sixteen digits that stand for resolved settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first settings that differ, for a message; of several kinds of nodes each setting
    once.
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    changed: dict[str, str] = {}
    for key in (*old, *(key for key in new if key not in old)):
        if old.get(key) != new.get(key) or (key in old) != (key in new):
            was = f"was {json.dumps(old[key])}" if key in old else "was not known"
            becomes = f"is {json.dumps(new[key])}" if key in new else "is not known"
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

"""Reads what a cluster has already, from the output of `kubectl get secrets,configmaps -o json`,
and finds what is missing. Pure.

The list may be empty because kubectl failed, or partial because kubectl was asked for a part.
Replacing keys that were merely not listed would shut every running node out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from shared.identity.roster import parse_roster
from swarm_cli.k8s.key_state import accounts_nodes
from swarm_cli.k8s.secret_objects import ACCOUNTS_FILE, AUTHORITY, ROSTER_FILE, SERVER_TLS, Expected

_TRUSTED = "ca.crt"
"""The only certificate file that clients hold too, so it must not be lost; the rest can be made
again."""
_ENTRIES = frozenset(("node.nk", "swarm.nk", "watch.nk", ACCOUNTS_FILE, ROSTER_FILE))
"""Entries that only a swarm's Secrets and ConfigMaps have, however they were made."""
Objects = Sequence[Mapping[str, Any]]


def listed(text: str) -> list[dict[str, Any]]:
    """The objects of a JSON list.

    Raises:
        ValueError: it is not a list of objects with kinds, names and entries.
    """
    if not text.strip():
        raise ValueError("it is empty, which happens if kubectl failed")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    kind = found.get("kind") if isinstance(found, dict) else None
    if not isinstance(kind, str) or not kind.endswith("List") or not isinstance(found.get("items"), list):
        raise ValueError("it is not a List of objects")
    for number, each in enumerate(found["items"], 1):
        if problem := _problem(each):
            raise ValueError(f"object {number} of the list {problem}")
    return list(found["items"])


def found_files(objects: Objects, wanted: Iterable[Expected], namespace: str) -> dict[str, str]:
    """The texts of the key folder's files that objects in `namespace` hold, by file.

    Raises:
        ValueError: an object is listed twice, or an entry is not text in base64.
    """
    held: dict[tuple[str, str], Mapping[str, Any]] = {}
    for each in objects:
        name = (each["kind"], each["metadata"]["name"])
        if each["metadata"].get("namespace") != namespace:
            continue
        if name in held:
            raise ValueError(f"{' '.join(name)} is in it twice")
        held[name] = each
    found: dict[str, str] = {}
    for expected in wanted:
        entries = held.get((expected.kind, expected.name), {}).get("data") or {}
        for key, file in expected.files.items():
            if key in entries:
                found[file] = _text(entries[key], expected, key)
    return found


def is_installed(objects: Objects, namespace: str) -> bool:
    """Whether `namespace` has anything of a swarm, even of nodes that were not named."""
    return any(
        each["metadata"].get("namespace") == namespace and not _ENTRIES.isdisjoint(each.get("data") or {}) for each in objects
    )


def known_nodes(wanted: Iterable[Expected], found: Mapping[str, str], roster: str) -> set[str]:
    """Nodes that exist already: `roster` or the cluster's roster lists them, the servers have an
    account for them, or one of their Secrets exists.

    Raises:
        RosterError: a roster is not valid.
    """
    with_secrets = {each.node for each in wanted if each.node and any(file in found for file in each.files.values())}
    in_roster = {*parse_roster(roster), *parse_roster(found.get(ROSTER_FILE, ""))}
    return with_secrets | in_roster | accounts_nodes(found.get(ACCOUNTS_FILE, ""))


def lost(wanted: Iterable[Expected], has: Collection[str], known: Collection[str]) -> list[str]:
    """Objects, such as `Secret alpha-trainer`, that a running swarm needs but that lack a file in
    `has`. Nodes not in `known` are being added and need none yet.
    """
    return [
        f"{each.kind} {each.name}"
        for each in wanted
        if (not each.node or each.node in known)
        and not all(file in has for file in each.files.values() if each.name not in (SERVER_TLS, AUTHORITY) or file == _TRUSTED)
    ]


def _problem(each: object) -> str:
    """Why this is not a Kubernetes object; empty if it is one."""
    metadata = each.get("metadata") if isinstance(each, dict) else None
    if not isinstance(each, dict) or not isinstance(metadata, dict):
        return "has no metadata"
    if not isinstance(each.get("kind"), str) or not isinstance(metadata.get("name"), str):
        return "has no kind or no name"
    data = each.get("data")
    if data is not None and not (isinstance(data, dict) and all(isinstance(text, str) for text in data.values())):
        return "has data that does not map names to texts"
    return ""


def _text(text: str, each: Expected, key: str) -> str:
    secret = each.kind == "Secret"
    try:
        return (base64.b64decode(text, validate=True) if secret else text.encode()).decode()
    except ValueError:
        raise ValueError(f"{each.kind} {each.name}: {key} is not text{' in base64' if secret else ''}") from None

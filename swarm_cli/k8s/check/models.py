"""Checks which model each node downloads, and the entries that pods pick from the overlay's own
objects.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

from shared.hub_models import COMMIT
from swarm_cli.k8s.check.findings import Finding, agree, listed
from swarm_cli.k8s.check.overlay import Object, Overlay
from swarm_cli.k8s.check.told import entry_texts

COMPONENT, DOWNLOAD = "app.kubernetes.io/component", "model-download"
_WITHOUT = {
    "volume": ("mounts", "mount", "stays in ContainerCreating", "stay in ContainerCreating"),
    "variable": ("reads", "read", "stays in CreateContainerConfigError", "stay in CreateContainerConfigError"),
}


def findings(overlay: Overlay) -> Iterator[Finding]:
    """Findings that need no cluster."""
    held = {(each["kind"], each["metadata"]["name"]): each for each in overlay.objects}
    for reference, workloads in overlay.own_references().items():
        found = held[reference.kind, reference.name]
        has = {*(found.get("data") or {}), *(found.get("stringData") or {}), *(found.get("binaryData") or {})}
        for key in sorted(reference.keys - has):
            verb, verbs, stays, stay = _WITHOUT[reference.use]
            who = f"which {listed(workloads)} {agree(workloads, verb, verbs)}"
            what = f"{reference.kind} {reference.name} has no entry {key}, {who} and so {agree(workloads, stays, stay)}"
            yield Finding(True, what, f"add {key}= to it in the kustomization that makes it")
    for workload in overlay.workloads():
        if workload.labels.get(COMPONENT) == DOWNLOAD:
            for container in workload.containers:
                yield from _downloaded(container, held)


def _downloaded(container: Object, held: dict[tuple[str, str], Object]) -> Iterator[Finding]:
    """The revision of one container's download, and whether the node trains that model."""
    picks = {each["name"]: each.get("valueFrom", {}).get("configMapKeyRef") for each in container.get("env", [])}
    if not (chosen := picks.get("MODEL")) or ("ConfigMap", chosen["name"]) not in held:
        return
    entries = entry_texts(held["ConfigMap", chosen["name"]])
    name, model = f"ConfigMap {chosen['name']}", entries.get(chosen["key"], "")
    revision = (picks.get("REVISION") or {}).get("key", "")
    if revision in entries and not re.fullmatch(COMMIT, entries[revision]):
        what = f"{name}: {revision} is {entries[revision] or 'empty'}, which is no full commit hash (40 hexadecimal digits)"
        remedy = "set it to the newest hash of the model's page under Files, History; the files under a branch or tag can change"
        yield Finding(not entries[revision], what, remedy)
    for entry, text in entries.items():
        if entry.endswith(".toml") and model and (trained := _trained(text)) and trained != model:
            what = f"{name}: {chosen['key']} is {model}, which is downloaded, but model.name in {entry} is {trained}"
            yield Finding(False, what, "give both the same name, unless the second is a public name on purpose")


def _trained(text: str) -> str:
    """The model that a node's file names; empty if it names none, or is not valid."""
    try:
        model = tomllib.loads(text).get("model", {})
    except tomllib.TOMLDecodeError:
        return ""
    return str(model.get("name", "")) if isinstance(model, dict) else ""

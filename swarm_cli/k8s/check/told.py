"""What a container of an overlay is told: its environment and its configuration file. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from swarm_cli.k8s.check.overlay import Object, Overlay, Workload

_UNKNOWN_URL = "tls://unknown:4222"
"""Stands for an address that a Secret holds."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a container, and the object that sets it: `ConfigMap alpha-settings`."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class File:
    """A file that a container sees: an entry of a ConfigMap, and its text. None: the ConfigMap has
    no such entry.
    """

    config_map: str
    entry: str
    text: str | None


def variables(overlay: Overlay, workload: Workload, container: Object) -> dict[str, Variable]:
    """The environment as far as the overlay tells it. Of a value in a Secret only that it is an
    address can be known; others are left out.
    """
    found: dict[str, Variable] = {}
    for source in container.get("envFrom", []):
        if name := source.get("configMapRef", {}).get("name"):
            entries = (_config_map(overlay, name) or {}).get("data") or {}
            prefix = source.get("prefix", "")
            found |= {f"{prefix}{key}": Variable(value or "", f"ConfigMap {name}") for key, value in entries.items()}
    for entry in container.get("env", []):
        found.pop(entry["name"], None)
        if (value := _value(overlay, workload, entry)) is not None:
            found[entry["name"]] = Variable(value, f"{workload.kind} {workload.name}")
    return found


def mounted_file(overlay: Overlay, workload: Workload, container: Object, path: str) -> File | None:
    """The ConfigMap's entry that the container sees as the file `path`; None if the path is on no
    ConfigMap's volume, or that ConfigMap is not in the overlay.
    """
    volumes = {each["name"]: each for each in workload.pod.get("volumes", [])}
    asked = PurePosixPath(path)
    for mount in container.get("volumeMounts", []):
        where = PurePosixPath(mount["mountPath"])
        source = volumes.get(mount["name"], {}).get("configMap")
        if source is None or not asked.is_relative_to(where):
            continue
        held = _config_map(overlay, source["name"])
        if held is None:
            return None
        within = mount.get("subPath") or str(asked.relative_to(where))
        paths = {item["path"]: item["key"] for item in source.get("items", [])}
        entry = paths.get(within, within)
        text = (held.get("data") or {}).get(entry) if not paths or within in paths else None
        return File(source["name"], entry, text)
    return None


def entry_texts(found: Object) -> dict[str, str]:
    """The entries of a Secret or ConfigMap as pods see them; empty for what is not text."""
    entries = found.get("data") or {}
    return {key: _decoded(value) for key, value in entries.items()} if found["kind"] == "Secret" else dict(entries)


def _decoded(encoded: str) -> str:
    try:
        return base64.b64decode(encoded).decode()
    except ValueError:
        return ""


def probed_ports(container: Object) -> Iterator[tuple[str, int]]:
    """Each HTTP probe with the number of its port."""
    named = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        port = container.get(probe, {}).get("httpGet", {}).get("port")
        number = named.get(port, port)
        if isinstance(number, int):
            yield probe, number


def _config_map(overlay: Overlay, name: str) -> Object | None:
    return next((each for each in overlay.with_kind("ConfigMap") if each["metadata"]["name"] == name), None)


def _value(overlay: Overlay, workload: Workload, entry: Object) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        text: str = entry.get("value") or ""
        return text
    if chosen := source.get("configMapKeyRef"):
        held: str | None = ((_config_map(overlay, chosen["name"]) or {}).get("data") or {}).get(chosen["key"])
        return held
    if source.get("fieldRef", {}).get("fieldPath") == "metadata.name":
        return f"{workload.name}-0"
    return _UNKNOWN_URL if "secretKeyRef" in source and entry["name"].endswith("_URL") else None

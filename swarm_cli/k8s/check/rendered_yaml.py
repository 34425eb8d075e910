"""Reads rendered YAML that somebody else may have made: a hundred kilobytes with aliases of aliases
stand for more than any memory holds. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from shared.text import visible
from swarm_cli.k8s.check.overlay import Object, Overlay

MAX_CHARS = 16 * 2**20
"""Of rendered YAML. A node takes some twenty thousand."""
MAX_ALIASED_CHARS = 2**20
"""What all aliases together may stand for. `kubectl kustomize` prints none."""


class _Loader(yaml.SafeLoader):
    """Counts what aliases stand for."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[Any, int] = {}
        """Of each node: the characters of its scalars, aliases written out, and one for itself."""
        self._aliased = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        if not is_alias:
            self._sizes[node] = 1 + sum(map(self._size, _parts(node)))
            return node
        self._aliased += self._size(node)
        if self._aliased > MAX_ALIASED_CHARS:
            problem = f"aliases stand for more than {MAX_ALIASED_CHARS:,} characters, among them those of this"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def _size(self, part: Any) -> int:
        # An alias within its own anchor stands for something without an end.
        return len(part) if isinstance(part, str) else self._sizes.get(part, MAX_ALIASED_CHARS + 1)


def _parts(node: Any) -> Iterator[Any]:
    if isinstance(node.value, str):
        yield node.value
    else:
        for part in node.value:
            yield from part if isinstance(part, tuple) else (part,)


def documents(text: str) -> list[Any]:
    """The documents that are not empty.

    Raises:
        ValueError: the text is not YAML, is too large, or its aliases stand for too much.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has more than {MAX_CHARS:,} characters")
    try:
        return [each for each in yaml.load_all(text, Loader=_Loader) if each]  # noqa: S506 (a safe loader)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except yaml.YAMLError as error:
        raise ValueError(visible(" ".join(str(error).split()))) from None


def not_text(overlay: Overlay) -> Iterator[str]:
    """Each entry of a ConfigMap and each variable whose value is not text, which Kubernetes
    refuses.
    """
    for each in overlay.with_kind("ConfigMap"):
        data = each.get("data") or {}
        name = f"ConfigMap {each['metadata'].get('name')}"
        if not isinstance(data, dict):
            yield f"{name}: data"
        else:
            yield from (f"{name}: {key}" for key, value in data.items() if not _is_text(value))
    for workload in overlay.workloads():
        for container in workload.containers:
            yield from (f"{workload.kind} {workload.name}: {name}" for name in _variables_not_text(container))


def _variables_not_text(container: Object) -> Iterator[str]:
    return (entry.get("name", "") for entry in container.get("env", []) if not _is_text(entry.get("value")))


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)

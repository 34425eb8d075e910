"""The objects of a cluster, as far as they could be read. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Objects by kind, as `kubectl get -o json` lists them."""

    listed: Mapping[str, Sequence[Object]]
    unread: Mapping[str, str] = field(default_factory=dict)
    """For each kind that could not be read, why; rules do not judge it."""
    minor: int = 0
    """Kubernetes 1.minor; 0: not known."""
    custom: frozenset[str] = frozenset()
    """Names of custom resource definitions, such as `scaledobjects.keda.sh`."""
    may_create_priorities: bool = True

    def knows(self, kind: str) -> bool:
        """Whether objects of this kind were read."""
        return kind in self.listed

    def names(self, kind: str) -> set[str]:
        """Names of all objects of a kind."""
        return {each["metadata"]["name"] for each in self.listed.get(kind, ())}

    def find(self, kind: str, name: str) -> Object | None:
        """One object; None if it does not exist or its kind was not read."""
        return next((each for each in self.listed.get(kind, ()) if each["metadata"]["name"] == name), None)

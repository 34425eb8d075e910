"""What a cluster says of itself, as far as it could be read. Pure."""

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
    """Why a kind could not be read; no rule says anything about it."""
    minor: int = 0
    """Kubernetes 1.minor; 0: not known."""
    custom: frozenset[str] = frozenset()
    """Names of custom resources' definitions: `scaledobjects.keda.sh`."""
    may_create_priorities: bool = True

    def knows(self, kind: str) -> bool:
        """Whether objects of this kind were read."""
        return kind in self.listed

    def names(self, kind: str) -> set[str]:
        """Names of all objects of a kind."""
        return {each["metadata"]["name"] for each in self.listed.get(kind, ())}

    def find(self, kind: str, name: str) -> Object | None:
        """One object; None: it is not there, or its kind was not read."""
        return next((each for each in self.listed.get(kind, ()) if each["metadata"]["name"] == name), None)

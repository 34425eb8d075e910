"""The names of kinds in addresses of the API: `NetworkPolicy` is `networkpolicies`."""

from __future__ import annotations


def plural(kind: str) -> str:
    """The plural of a kind, in lower case."""
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith(("s", "x", "ch")) else f"{name}s"

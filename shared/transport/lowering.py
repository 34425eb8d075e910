"""What to do when a stream exists with more copies, room or time than is wanted now.

Lowering a limit deletes messages at once, and fewer replicas are noticed only when a machine fails,
so neither may be the side effect of a setting that somebody forgot (`nats.replicas` defaults to 1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shared.transport.base import TransportError


class WouldLower(TransportError):
    """A stream has more copies, room or time than is wanted, and nobody said to lower it."""

    def __init__(self, stream: str, wanted: Mapping[str, Any], actual: Mapping[str, Any], lowered: Collection[str]) -> None:
        differences = ", ".join(f"{name} from {_shown(actual.get(name))} to {wanted[name]}" for name in lowered)
        super().__init__(f"stream {stream} was left unchanged: this would lower {differences}")


def lowered(wanted: Mapping[str, Any], actual: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Those of `names` that an update from `actual` to `wanted` would lower.

    Values that are missing, zero or negative mean "no limit", as they do to a NATS server.
    """
    return [name for name in names if _is_lower(wanted.get(name), actual.get(name))]


def _is_lower(wanted: float | None, actual: float | None) -> bool:
    if wanted is None or wanted <= 0:
        return False
    return actual is None or actual <= 0 or wanted < actual


def _shown(value: float | None) -> str:
    return "no limit" if value is None or value <= 0 else str(value)

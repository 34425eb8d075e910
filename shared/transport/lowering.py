"""What to do when a stream exists with more replicas, larger limits or longer ages than are wanted
now.

Lowering a limit deletes messages at once, and missing replicas are noticed only when a machine
fails. So neither may be the side effect of a setting that somebody forgot (`nats.replicas` defaults
to 1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shared.transport.base import TransportError


class WouldLower(TransportError):
    """A stream has more replicas, larger limits or longer ages than are wanted, and lowering them
    was not requested.
    """

    def __init__(self, stream: str, wanted: Mapping[str, Any], actual: Mapping[str, Any], lowered: Collection[str]) -> None:
        differences = ", ".join(f"{name} from {_shown(actual.get(name))} to {wanted[name]}" for name in lowered)
        super().__init__(f"stream {stream} was left unchanged: this would lower {differences}")


def lowered(wanted: Mapping[str, Any], actual: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """The settings among `names` that an update from `actual` to `wanted` would lower.

    Missing, zero and negative values mean "no limit", as for a NATS server.
    """
    return [name for name in names if _is_lower(wanted.get(name), actual.get(name))]


def _is_lower(wanted: float | None, actual: float | None) -> bool:
    if wanted is None or wanted <= 0:
        return False
    return actual is None or actual <= 0 or wanted < actual


def _shown(value: float | None) -> str:
    return "no limit" if value is None or value <= 0 else str(value)

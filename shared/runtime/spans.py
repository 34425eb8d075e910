"""The path of a group as spans of one trace. Each service says what it did with a group; nobody
passes a context on, because trace and root span follow from the group's content id.

`emit` costs one comparison while nobody listens. `shared.runtime.otel` listens where an endpoint
is configured.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

AttributeValue = str | int | float | bool
GENERATE, SCORE, SHARE, BORDER, BATCH, TRAIN = "generate", "score", "share", "border check", "batch", "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """Something that this process did with a group. start_s, end_s: Unix time. error: whether it
    ended as nobody wants it to; a refusal is no error. same_as: the content id that the group has
    elsewhere, where it was shared without its token ids.
    """

    group_id: str
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    error: bool = False
    same_as: str | None = None


class SpanSink(Protocol):
    """Where spans go. May not block, and raises nothing."""

    def take(self, span: GroupSpan) -> None:
        """One span."""

    def close(self) -> None:
        """Send the rest, within a second or so."""


_sink: SpanSink | None = None


def send_to(sink: SpanSink | None) -> None:
    """From now on this process's spans go to `sink`."""
    global _sink
    _sink = sink


def wanted() -> bool:
    """Whether anybody listens."""
    return _sink is not None


def emit(
    group_id: str, name: str, *, seconds: float = 0.0, same_as: str | None = None, **attributes: AttributeValue | None
) -> None:
    """Say that `name` ended just now and took `seconds`. Attributes that are None are left out."""
    if _sink is not None:
        now = time.time()
        known = {key: value for key, value in attributes.items() if value is not None}
        same = same_as if same_as != group_id else None
        _sink.take(
            GroupSpan(group_id=group_id, name=name, start_s=now - max(0.0, seconds), end_s=now, attributes=known, same_as=same)
        )


def trace_id_of(group_id: str) -> int:
    """The first 32 digits of the content id. A rollout id is the first 16: a trace is found by
    it.
    """
    return int(group_id[:32], 16)


def root_span_id_of(group_id: str) -> int:
    """Of the generator's span, which all others are below."""
    return _number(f"root/{group_id}")


def span_id_of(span: GroupSpan, node: str) -> int:
    """The same each time that `node` says the same of a group: what is done again after a crash is
    there once.
    """
    if span.name == GENERATE:
        return root_span_id_of(span.group_id)
    apart = [span.attributes.get(key, "") for key in ("step", "outcome", "reason")]
    return _number(f"{span.name}/{node}/{apart}/{span.group_id}")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") or 1

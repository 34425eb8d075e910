"""Spans that show a group's path as one trace. Each service emits a span for what it did with a
group. No trace context is passed between services, because the ids of trace and root span follow
from the group's content id.

Without a sink `emit` costs one comparison. `shared.runtime.otel` is the sink if an endpoint is
configured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shared.seeds import number_from

AttributeValue = str | int | float | bool
GENERATE, SCORE, SHARE, BORDER, BATCH, TRAIN = "generate", "score", "share", "border check", "batch", "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """Something that this process did with a group. start_s, end_s: Unix time. error: whether it
    failed; a refusal is not an error. same_as: the content id of the same group in the form without
    token ids in which it was shared.
    """

    group_id: str
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    error: bool = False
    same_as: str | None = None


class SpanSink(Protocol):
    """Receives spans. Must not block or raise."""

    def take(self, span: GroupSpan) -> None:
        """Accept one span."""

    def close(self) -> None:
        """Send the remaining spans, within a second or so."""


_sink: SpanSink | None = None


def send_to(sink: SpanSink | None) -> None:
    """Send this process's spans to `sink` from now on."""
    global _sink
    _sink = sink


def wanted() -> bool:
    """Check whether there is a sink."""
    return _sink is not None


def emit(
    group_id: str, name: str, *, seconds: float = 0.0, same_as: str | None = None, **attributes: AttributeValue | None
) -> None:
    """Emit a span called `name` that ends now and took `seconds`. Attributes that are None are left
    out.
    """
    if _sink is not None:
        now = time.time()
        known = {key: value for key, value in attributes.items() if value is not None}
        same = same_as if same_as != group_id else None
        _sink.take(
            GroupSpan(group_id=group_id, name=name, start_s=now - max(0.0, seconds), end_s=now, attributes=known, same_as=same)
        )


def trace_id_of(group_id: str) -> int:
    """The first 32 digits of the content id. A rollout id is the first 16 of them, so it identifies
    the trace.
    """
    return int(group_id[:32], 16)


def root_span_id_of(group_id: str) -> int:
    """Id of the generator's span, the root of the trace."""
    return _number(f"root/{group_id}")


def span_id_of(span: GroupSpan, node: str) -> int:
    """The same id whenever `node` emits the same span for a group, so that work repeated after a
    crash appears once.
    """
    if span.name == GENERATE:
        return root_span_id_of(span.group_id)
    apart = [span.attributes.get(key, "") for key in ("step", "outcome", "reason")]
    return _number(f"{span.name}/{node}/{apart}/{span.group_id}")


def _number(text: str) -> int:
    return number_from(text) or 1

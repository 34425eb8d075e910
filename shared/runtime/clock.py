"""Measures the offset of this machine's clock from its NATS server's, using the time that the
server assigns to a write.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from shared.runtime.metrics import LateGauge


def ahead_s(sent_at: float, stored_at: float, answered_at: float) -> float:
    """Seconds by which this clock is ahead of the server's. All arguments are Unix times in
    seconds; `stored_at` is the server's. The offset is uncertain by half the duration of the write,
    and an offset within that uncertainty counts as 0.
    """
    middle, half = (sent_at + answered_at) / 2, (answered_at - sent_at) / 2
    off = middle - stored_at
    return max(0.0, off - half) if off > 0 else min(0.0, off + half)


class ClockSkew:
    """Exports the newest measurement on /metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = LateGauge(
            "swarm_clock_skew_seconds",
            "How far this machine's clock is ahead of its NATS server's; negative: behind. Other nodes judge the age of this "
            "node's groups by this clock (verifier.max_clock_skew_s). Absent until measured.",
            registry=registry,
        )

    def measured(self, sent_at: float, stored_at: float, answered_at: float) -> None:
        """A write that this process sent at `sent_at` was answered at `answered_at`."""
        self._gauge.set(ahead_s(sent_at, stored_at, answered_at))

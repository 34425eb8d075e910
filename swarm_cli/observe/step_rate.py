"""Steps per minute of nodes that a view looks at again and again."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from shared.contracts.status_figures import StatusFigure
from swarm_cli.observe.node_state import NodeState

_RATE_WINDOW_S = 60.0


class StepRate:
    """One node's steps per minute, over the steps of the last minute or the newest two that were
    seen, by the times at which the trainer ended them. It begins anew with a trainer that was
    started again, and that takes the steps after its checkpoint again.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, ended_at: float, step: int, started_at: float = 0.0) -> float | None:
        """Record that `step` ended at `ended_at`, in a process of `started_at` (Unix times).
        Returns the rate; None before a second step was seen.
        """
        seen = self._seen
        if seen and (step < seen[-1][1] or seen[-1][0] < started_at):
            seen.clear()
        if not seen or step > seen[-1][1]:
            seen.append((ended_at, step))
        while len(seen) > 2 and seen[1][0] <= seen[-1][0] - _RATE_WINDOW_S:
            seen.popleft()
        elapsed_s = seen[-1][0] - seen[0][0]
        return 60.0 * (seen[-1][1] - seen[0][1]) / elapsed_s if elapsed_s > 0 else None


class StepRates:
    """The rate of each node that a view looks at again and again."""

    def __init__(self) -> None:
        self._rates: dict[str, StepRate] = {}

    def rated(self, node: NodeState) -> NodeState:
        """The node with the steps per minute that were seen since it was first looked at."""
        trainer = node.alive("trainer")[:1]
        step, ended_at = (trainer[0].figures.get(name) if trainer else None for name in (StatusFigure.STEP, StatusFigure.WORKED_AT))
        if step is None or ended_at is None:
            return replace(node, seen_rate=None)
        rate = self._rates.setdefault(node.node, StepRate())
        return replace(node, seen_rate=rate.update(ended_at, int(step), trainer[0].started_at))

"""Steps per minute of nodes that a view looks at again and again."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from swarm_cli.observe.node_state import NodeState

_RATE_WINDOW_S = 60.0


class StepRate:
    """One node's steps per minute, over the last minute, and since it last fell back: a trainer
    that was killed takes the steps after its checkpoint again. The time before the first step is
    seen, in which models load and the base policy is evaluated, does not count.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._rose = False

    def update(self, now: float, step: int) -> float | None:
        """Record `step` at `now` (seconds). Returns the rate, or None at the first call and after a
        fall.
        """
        fell = bool(self._seen) and step < self._seen[-1][1]
        self._rose = not fell and (self._rose or (bool(self._seen) and step > self._seen[-1][1]))
        if not self._rose:
            self._seen.clear()
        elif now == self._seen[-1][0]:
            self._seen.pop()
        self._seen.append((now, step))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_WINDOW_S:
            self._seen.popleft()
        elapsed_s = now - self._seen[0][0]
        return 60.0 * (step - self._seen[0][1]) / elapsed_s if elapsed_s > 0 else None


class StepRates:
    """The rate of each node that a view looks at again and again."""

    def __init__(self) -> None:
        self._rates: dict[str, StepRate] = {}

    def rated(self, node: NodeState) -> NodeState:
        """The node with its steps per minute since it was looked at before."""
        return replace(node, seen_rate=self._rates.setdefault(node.node, StepRate()).update(node.at, node.step))

"""The held-out scores that nodes reported to the swarm, for `swarm top`. Anybody can write there: a
bounded part is kept.
"""

from __future__ import annotations

from collections import deque
from itertools import chain

import msgspec

from shared.contracts import subjects
from shared.contracts.codec import decode
from shared.contracts.control import EvalReport
from shared.contracts.wire import MessageError
from shared.transport.base import Transport, TransportError

REPORTS_A_LOOK = 8192
"""Of a stream with more that is new, the newest."""
REPORTS_A_NODE = 256
NODES_KEPT = 1024
_REPORTS_A_READ = 1024


class EvaluationLog:
    """Read on from look to look; of each node the newest reports, of many nodes those that reported
    last.
    """

    def __init__(self) -> None:
        self._by_node: dict[str, deque[EvalReport]] = {}
        self._next_seq = 1

    @property
    def reports(self) -> list[EvalReport]:
        """What is kept, each node's in the order of the stream; without their results by
        dataset.
        """
        return list(chain.from_iterable(self._by_node.values()))

    async def follow(self, swarm_plane: Transport) -> None:
        """Read what is new. A server whose stream is shorter than what was read is another one:
        begin again.
        """
        try:
            state = await swarm_plane.stream_state(subjects.SWARM_EVALS)
            if state.last_seq + 1 < self._next_seq:
                self._by_node, self._next_seq = {}, 1
            self._next_seq = max(self._next_seq, state.last_seq - REPORTS_A_LOOK + 1)
            # No more reads than that takes, so that a look ends however fast somebody writes.
            for _ in range(REPORTS_A_LOOK // _REPORTS_A_READ + 1):
                messages = await swarm_plane.read(subjects.SWARM_EVALS, self._next_seq, _REPORTS_A_READ)
                if not messages:
                    return
                self._next_seq = messages[-1].seq + 1
                for message in messages:
                    # A report is never large enough for a claim check: one that says so wants to be
                    # fetched, not read.
                    if message.inline is not None:
                        self._take(message.subject, message.inline)
        except TransportError:
            return

    def _take(self, subject: str, payload: bytes) -> None:
        try:
            report = decode(payload, EvalReport)
        except MessageError:
            return
        if subject != subjects.evals(report.node):
            return
        kept = self._by_node.pop(report.node, None) or deque(maxlen=REPORTS_A_NODE)
        kept.append(msgspec.structs.replace(report, per_task={}))
        self._by_node[report.node] = kept
        if len(self._by_node) > NODES_KEPT:
            del self._by_node[next(iter(self._by_node))]

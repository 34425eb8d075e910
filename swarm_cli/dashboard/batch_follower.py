"""Reads on in the batch logs of the nodes on a server, without a consumer, and within bounds."""

from __future__ import annotations

from collections.abc import Sequence

from shared.contracts.codec import decode
from shared.contracts.messages import Batch
from shared.contracts.subjects import node_batches_stream
from shared.contracts.wire import MessageError
from shared.transport.base import NotConnected, Transport, TransportError
from swarm_cli.dashboard.exchange import Exchange

BATCHES_BACK = 30
"""Where a node is seen first, so many of its newest batches are read; also the most in one look."""
BATCH_BYTES = 32 * 2**20
"""A larger batch is not read for a list of texts; its own page reads it."""


class BatchFollower:
    """Where it is in each node's log, and what it read so far."""

    def __init__(self) -> None:
        self.exchange = Exchange()
        self._read_to: dict[str, int] = {}

    async def follow(self, plane: Transport, nodes: Sequence[str]) -> None:
        """Read what is new of `nodes`.

        Raises:
            NotConnected: the server does not answer.
        """
        for node in nodes:
            try:
                await self._follow_node(plane, node)
            except NotConnected:
                raise
            except TransportError:
                continue  # its log is not there yet

    async def _follow_node(self, plane: Transport, node: str) -> None:
        stream = node_batches_stream(node)
        state = await plane.stream_state(stream)
        known = self._read_to.get(node)
        if known is None or known > state.last_seq:  # new here, or another log under the old name
            known = state.first_seq - 1
        oldest = max(known + 1, state.last_seq - BATCHES_BACK + 1)
        self.exchange.left_out += max(0, oldest - known - 1)
        seq = oldest
        while seq <= state.last_seq:
            messages = await plane.read(stream, seq, 1)
            if not messages or messages[0].seq > state.last_seq:
                break
            seq = messages[0].seq + 1
            if messages[0].size_bytes > BATCH_BYTES:
                self.exchange.left_out += 1
                continue
            try:
                self.exchange.take(node, decode(await plane.payload(messages[0]), Batch))
            except MessageError:
                self.exchange.left_out += 1
        self._read_to[node] = state.last_seq

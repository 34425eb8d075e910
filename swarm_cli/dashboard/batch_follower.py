"""Reads on in the batch logs of the nodes on a server, without a consumer, and within bounds."""

from __future__ import annotations

from collections.abc import Sequence

from shared.contracts.codec import decode
from shared.contracts.messages import Batch
from shared.contracts.subjects import node_batches_stream
from shared.contracts.wire import MessageError
from shared.transport.base import NotConnected, StoredMessage, Transport, TransportError
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
        self._at = ""

    async def follow(self, plane: Transport, nodes: Sequence[str]) -> None:
        """Read what is new of `nodes`. It may be cancelled at any time: the next call goes on
        behind the last batch that was read, first with the node that was being read.

        Raises:
            NotConnected: the server does not answer.
        """
        first = nodes.index(self._at) if self._at in nodes else 0
        for node in (*nodes[first:], *nodes[:first]):
            self._at = node
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
        self._read_to[node] = oldest - 1
        while self._read_to[node] < state.last_seq:
            messages = await plane.read(stream, self._read_to[node] + 1, 1)
            if not messages or messages[0].seq > state.last_seq:
                break
            batch = await _batch(plane, messages[0])
            # Counted and noted as read without a pause between, so that no batch counts twice.
            if batch is None:
                self.exchange.left_out += 1
            else:
                self.exchange.take(node, batch)
            self._read_to[node] = messages[0].seq
        self._read_to[node] = state.last_seq


async def _batch(plane: Transport, message: StoredMessage) -> Batch | None:
    """None where it is too large or none."""
    if message.size_bytes > BATCH_BYTES:
        return None
    try:
        return decode(await plane.payload(message), Batch)
    except MessageError:
        return None

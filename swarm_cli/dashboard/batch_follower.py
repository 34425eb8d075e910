"""Follows the batch logs of the nodes on a server, without a consumer and within bounds."""

from __future__ import annotations

from collections.abc import Sequence

from shared.contracts.codec import decode
from shared.contracts.messages import Batch
from shared.contracts.subjects import node_batches_stream
from shared.contracts.wire import MessageError
from shared.transport.base import NotConnected, StoredMessage, Transport, TransportError
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.rollouts.batches import RecordedBatches

BATCHES_BACK = 30
"""How many of its newest batches are read when a node is first seen; also the most per look."""
BATCH_BYTES = 32 * 2**20
"""A larger batch is not read for the list of texts, only when its own page is opened."""


class BatchFollower:
    """The position in each node's log, and what was read so far."""

    def __init__(self) -> None:
        self.recent = RecentGroups()
        self._read_to: dict[str, int] = {}
        self._at = ""
        self._held: dict[str, tuple[int, int]] = {}

    async def follow(self, plane: Transport, nodes: Sequence[str]) -> None:
        """Read the new batches of `nodes`. It may be cancelled at any time: the next call continues
        after the last batch read, and starts with the node that was being read.

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
                continue  # it has no log yet

    async def read_recorded(self, node: str, batches: RecordedBatches) -> None:
        """Read the newest batches on record of a node whose run has ended."""
        newest: list[Batch] = []
        async for batch in batches.back_from(await batches.last_seq()):
            newest.append(batch)
            if len(newest) == BATCHES_BACK:
                break
        for batch in reversed(newest):
            self.recent.take(node, batch)
        if newest:
            self._held[node] = (batches.steps[0], newest[0].number)

    def first_held(self, node: str) -> int:
        """The oldest step whose batch the node's log holds. A log has a batch for each step, in
        order, so it is counted back from the newest that was read.
        """
        steps, (first_seq, read_seq) = self.recent.steps(node), self._held.get(node, (0, 0))
        return steps[-1].step - (read_seq - first_seq) if steps else 0

    async def _follow_node(self, plane: Transport, node: str) -> None:
        stream = node_batches_stream(node)
        state = await plane.stream_state(stream)
        known = self._read_to.get(node)
        if known is None or known > state.last_seq:  # a new node, or a new log under the old name
            known = state.first_seq - 1
        self._held[node] = (state.first_seq, self._held.get(node, (0, 0))[1])
        oldest = max(known + 1, state.last_seq - BATCHES_BACK + 1)
        self._read_to[node] = oldest - 1
        while self._read_to[node] < state.last_seq:
            messages = await plane.read(stream, self._read_to[node] + 1, 1)
            if not messages or messages[0].seq > state.last_seq:
                break
            batch = await _batch(plane, messages[0])
            # No await between counting a batch and marking it as read, so that none counts twice.
            if batch is not None:
                self.recent.take(node, batch)
                self._held[node] = (state.first_seq, messages[0].seq)
            self._read_to[node] = messages[0].seq
        self._read_to[node] = state.last_seq


async def _batch(plane: Transport, message: StoredMessage) -> Batch | None:
    """The message's batch; None if it is too large or cannot be decoded."""
    if message.size_bytes > BATCH_BYTES:
        return None
    try:
        return decode(await plane.payload(message), Batch)
    except MessageError:
        return None

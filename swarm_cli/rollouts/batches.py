"""The groups in a node's batches, read from its batch log without a consumer, so that reading them
does not affect the services.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from shared.contracts.codec import decode
from shared.contracts.messages import Batch, BatchItem
from shared.contracts.subjects import node_batches_stream
from shared.contracts.wire import MessageError
from shared.transport.base import StreamState, Transport, TransportError
from swarm_cli.errors import CommandError

BATCHES_READ = 200
"""How many batches one look goes back at most, because a batch can be megabytes."""


@dataclass(frozen=True, slots=True)
class BatchedGroup:
    """A group and the batch that it is part of; batch n is trained at step n."""

    batch: Batch
    item: BatchItem


class BatchReader:
    """The batches that a node's log still holds: the newest, and those that may follow a kept
    checkpoint.
    """

    def __init__(self, transport: Transport, node: str) -> None:
        self._transport = transport
        self._node = node
        self._stream = node_batches_stream(node)

    async def last_seq(self) -> int:
        """Sequence number of the log's last message."""
        return (await self._state()).last_seq

    async def back_from(self, last_seq: int) -> AsyncIterator[Batch]:
        """The batches up to a position in the log, newest first, at most `BATCHES_READ`."""
        state = await self._state()
        oldest = max(state.first_seq, last_seq - BATCHES_READ + 1)
        for seq in range(last_seq, oldest - 1, -1) if state.messages else ():
            found = await self._at_or_after(seq)
            if found is not None and found[0] == seq:
                yield found[1]

    async def after(self, seq: int) -> AsyncIterator[tuple[int, Batch]]:
        """The batches after a position in the log, each with its position, until the log ends."""
        while (found := await self._at_or_after(seq + 1)) is not None:
            yield found
            seq = found[0]

    async def batch_at(self, step: int) -> Batch:
        """The batch of one step.

        Raises:
            CommandError: the log does not hold it, either no longer or not yet.
        """
        state = await self._state()
        low, high = state.first_seq, state.last_seq
        # Numbers grow along the log, except that a batch may be in it twice.
        while state.messages and low <= high:
            middle = (low + high) // 2
            found = await self._at_or_after(middle)
            if found is None or found[1].number > step:
                high = middle - 1
            elif found[1].number < step:
                low = found[0] + 1
            else:
                return found[1]
        raise CommandError(f"the batch log of {self._node} does not hold step {step}: {await self._held()}")

    async def _state(self) -> StreamState:
        try:
            return await self._transport.stream_state(self._stream)
        except TransportError as error:
            if "stream not found" not in str(error):
                raise
            raise CommandError(
                f"this server has no batch log of {self._node}: check the name (`swarm status` shows a server's nodes) and the "
                "server (--node-url)"
            ) from None

    async def _held(self) -> str:
        state = await self._state()
        first = await self._at_or_after(state.first_seq) if state.messages else None
        last = await self._at_or_after(state.last_seq) if state.messages else None
        if first is None or last is None:
            return "it is empty; check that the node is running and that this is its server (--node-url)"
        return f"it holds steps {first[1].number} to {last[1].number} (older ones are removed once no checkpoint needs them)"

    async def _at_or_after(self, seq: int) -> tuple[int, Batch] | None:
        messages = await self._transport.read(self._stream, seq, 1)
        if not messages:
            return None
        payload = await self._transport.payload(messages[0])
        try:
            return messages[0].seq, decode(payload, Batch)
        except MessageError as error:
            raise CommandError(
                f"message {messages[0].seq} of {self._stream} is not a batch that this version can read ({error}): "
                "use the version of swarm that the node runs"
            ) from None

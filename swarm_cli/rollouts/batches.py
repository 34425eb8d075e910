"""The groups in a node's batches: of a running node from its batch log, without a consumer, so that
reading them does not affect the services; of an ended run from the trainer's record of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.contracts.codec import decode
from shared.contracts.messages import Batch, BatchItem
from shared.contracts.subjects import node_batches_stream
from shared.contracts.wire import MessageError
from shared.json_lines import older
from shared.plain_files import open_plain, whole_lines
from shared.run_records import BATCHES_FILE, BATCHES_MAX_BYTES
from shared.transport.base import StreamState, Transport, TransportError
from swarm_cli.errors import CommandError

BATCHES_READ = 200
"""How many batches one look goes back at most, because a batch can be megabytes."""


@dataclass(frozen=True, slots=True)
class BatchedGroup:
    """A group and the batch that it is part of; batch n is trained at step n."""

    batch: Batch
    item: BatchItem


class RecordedBatches:
    """The batches of an ended run that its trainer has recorded (`batches.jsonl`). A position is a
    step. Of a step that was trained twice, the later line counts.
    """

    def __init__(self, folder: Path | None, node: str) -> None:
        """folder: the node's in the run; None: this machine has none."""
        self._node = node
        self._places: dict[int, tuple[Path, int, int]] = {}
        path = Path() if folder is None else folder / BATCHES_FILE
        for file in () if folder is None else (older(path), path):
            self._index(file)

    @property
    def steps(self) -> list[int]:
        """The steps on record, in order."""
        return sorted(self._places)

    async def last_seq(self) -> int:
        """The last step on record; 0 if there is none."""
        return max(self._places, default=0)

    async def back_from(self, last_seq: int) -> AsyncIterator[Batch]:
        """The batches up to a step, newest first, at most `BATCHES_READ`."""
        for step in sorted((step for step in self._places if step <= last_seq), reverse=True)[:BATCHES_READ]:
            if (batch := self._read(step)) is not None:
                yield batch

    async def batch_at(self, step: int) -> Batch:
        """The batch of one step.

        Raises:
            CommandError: it is not on record.
        """
        if (batch := self._read(step)) is not None:
            return batch
        steps = self.steps
        there = f"{BATCHES_FILE} holds steps {steps[0]} to {steps[-1]}" if steps else f"it has no {BATCHES_FILE} here"
        raise CommandError(f"the records of {self._node} do not hold step {step}: {there}")

    def _index(self, path: Path) -> None:
        try:
            descriptor = open_plain(path)
        except OSError:
            return
        with open(descriptor, "rb") as file:
            for block, end in whole_lines(file, 0, BATCHES_MAX_BYTES):
                at = end - len(block)
                for line in block.splitlines(keepends=True):
                    name, _, number = line.partition(b",")[0].partition(b":")
                    if name == b'{"step"' and number.isdigit() and len(number) < 16:
                        self._places[int(number)] = path, at, len(line)
                    at += len(line)

    def _read(self, step: int) -> Batch | None:
        if step not in self._places:
            return None
        path, at, size = self._places[step]
        try:
            with open(open_plain(path), "rb") as file:
                file.seek(at)
                return msgspec.json.decode(file.read(size), type=_BatchLine).batch
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


class _BatchLine(msgspec.Struct, frozen=True):
    step: int
    batch: Batch


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

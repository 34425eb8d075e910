"""The sampler's two streams: it reads the scored log and appends to the batch log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from services.sampler.composition import HeldOutResult
from services.sampler.memory import SamplerMemory
from services.sampler.pool import PoolEntry
from shared.cancelling import together
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, TrainerPosition
from shared.contracts.limits import MIB, NODE_LIMITS
from shared.contracts.messages import Batch, ScoredGroup
from shared.contracts.subjects import EVAL_KEY, TRAINER_KEY, node_batches, node_batches_stream, node_bucket, node_scored_stream
from shared.contracts.wire import MessageError
from shared.runtime import FatalError
from shared.runtime.logs import Log
from shared.text import visible
from shared.transport.base import NotConnected, StoredMessage, TooLarge, Transport, TransportError

_MESSAGES_PER_READ = 256
_PAYLOADS_AT_ONCE = 16
_LAGGING_S = 0.02
KEPT_BYTES = 256 * MIB
"""Largest size of waiting local groups kept in memory: 10 groups of 64 completions of 32k tokens,
or thousands of short ones.
"""


class ScoredLog:
    """A node's scored groups, by position.

    Local groups that wait for a batch are also kept in memory: the stream is a window, which
    foreign groups fill as fast as the verifier's budget allows, and a batch may take long to train.
    A restarted sampler finds only what is in the stream.
    """

    def __init__(self, transport: Transport, node: str) -> None:
        self.stream = node_scored_stream(node)
        self._transport = transport
        self._kept: dict[int, bytes] = {}
        self._kept_bytes = 0

    def begin(self) -> None:
        """Discard the groups kept in memory, because the stream is read again and may have been
        created anew.
        """
        self._kept.clear()
        self._kept_bytes = 0

    async def read_to(self, last_seq: int, memory: SamplerMemory, timeout_s: float) -> list[str]:
        """Read until `memory` has taken in position `last_seq`. Returns the problems of unreadable
        messages.

        Raises:
            TransportError: the stream returned nothing new for longer than `timeout_s`.
        """
        problems: list[str] = []
        started = time.monotonic()
        while memory.cursor < last_seq:
            before = memory.cursor
            problems += await self.read_into(memory)
            if memory.cursor == before:  # the answer came from a replica of the stream that lags behind its leader
                if time.monotonic() - started > timeout_s:
                    raise TransportError(f"{self.stream} returns nothing after {before}, although its last message is {last_seq}")
                await asyncio.sleep(_LAGGING_S)
        return problems

    async def read_into(self, memory: SamplerMemory) -> list[str]:
        """Take in the next messages after the memory's cursor, at most some hundreds. Returns the
        problems of unreadable ones.

        If there was any message, the cursor has moved; otherwise it has not.
        """
        problems: list[str] = []
        for message in await self._transport.read(self.stream, memory.cursor + 1, _MESSAGES_PER_READ):
            payload, scored = await self._readable(message, problems)
            memory.observe(message.seq, scored)
            if memory.local.holds_seq(message.seq) and self._kept_bytes + len(payload) <= KEPT_BYTES:
                self._kept[message.seq] = payload
                self._kept_bytes += len(payload)
        for seq in [seq for seq in self._kept if not memory.local.holds_seq(seq)]:
            self._kept_bytes -= len(self._kept.pop(seq))
        return problems

    async def payloads(self, entries: Iterable[PoolEntry]) -> dict[int, ScoredGroup | None]:
        """The groups at the entries' positions; None for one that neither the stream nor this
        process still holds.
        """
        slots = asyncio.Semaphore(_PAYLOADS_AT_ONCE)

        async def one(seq: int) -> tuple[int, ScoredGroup | None]:
            if (kept := self._kept.get(seq)) is not None:
                return seq, decode(kept, ScoredGroup)
            async with slots:
                message = await self._transport.get(self.stream, seq)
                return seq, None if message is None else (await self._readable(message, []))[1]

        return dict(await together(*(one(entry.seq) for entry in entries)))

    async def bounds(self) -> tuple[int, int]:
        """The first position still in the stream (one past the last if it is empty) and the last
        position ever used.
        """
        state = await self._transport.stream_state(self.stream)
        return (state.first_seq if state.messages else state.last_seq + 1), state.last_seq

    async def purge(self, up_to_seq: int) -> None:
        await self._transport.purge(self.stream, up_to_seq)

    async def _readable(self, message: StoredMessage, problems: list[str]) -> tuple[bytes, ScoredGroup | None]:
        """The payload and its group. If it is unreadable for a reason that reading again would not
        change: no group, and a problem.
        """
        try:
            payload = await self._transport.payload(message)
            return payload, decode(payload, ScoredGroup)
        except NotConnected:
            raise
        except (MessageError, TransportError) as error:
            problems.append(f"position {message.seq}: {error}")
            return b"", None


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest batch (None before the first) and the position after which the next one must be
    appended.
    """

    batch: Batch | None
    seq: int


class BatchAppender:
    """A node's batches. Appending is a compare-and-set on the log's end, so that two samplers never
    both append one.
    """

    def __init__(self, transport: Transport, node: str, max_bytes: int = NODE_LIMITS.batch_max_bytes) -> None:
        """`max_bytes`: largest batch. The log deletes its oldest batches, but must hold all those
        that are in no checkpoint of the trainer yet.
        """
        self.stream = node_batches_stream(node)
        self._subject = node_batches(node)
        self._max_bytes = max_bytes
        self._transport = transport

    async def newest(self) -> Newest:
        """The end of the log.

        Raises:
            MessageError: the newest message is no batch, or has a version that this software does
                not know.
        """
        message = await self._transport.last(self.stream, self._subject)
        if message is None:
            return Newest(None, (await self._transport.stream_state(self.stream)).last_seq)
        return Newest(decode(await self._transport.payload(message), Batch), message.seq)

    async def append(self, batch: Batch, after_seq: int) -> int | None:
        """Append right after `after_seq`; returns the position.

        None if a batch with this number already existed, possibly with other content: read the
        log's end.

        Raises:
            Conflict: the log's end is elsewhere.
            TooLarge: the batch is larger than `max_bytes`, or than the stream allows.
            FatalError: the batch could not be read again, at which every later start would end.
            TransportError: it is unknown whether the batch was stored; read the log's end.
        """
        payload = encode(batch)
        if len(payload) > self._max_bytes:
            raise TooLarge(
                f"a batch of {len(payload)} bytes exceeds {self._max_bytes}, the limit: not published",
                self._max_bytes,
            )
        try:
            decode(payload, Batch)  # the encoder packs values that no reader accepts
        except MessageError as error:
            raise FatalError(
                f"batch {batch.number}, drawn by strategy {visible(batch.strategy, 100)}, could not be read again, and is not "
                f"published: {error}: if an installed package has that strategy, correct it, or change sampler.strategy"
            ) from None
        ack = await self._transport.publish(
            self._subject,
            payload,
            stream=self.stream,
            message_id=f"batch-{batch.number}",
            expected_last_seq=after_seq,
        )
        return None if ack.duplicate else ack.seq


class NodeNews:
    """The newest position and evaluation; `news` is set when the trainer has moved."""

    def __init__(self, node_id: str, node: Transport, log: Log) -> None:
        self._bucket, self._node, self._log = node_bucket(node_id), node, log
        self.position: TrainerPosition | None = None
        self.evaluation: HeldOutResult | None = None
        self.news = asyncio.Event()

    async def follow_trainer(self) -> None:
        async for entry in self._node.kv.watch(self._bucket, TRAINER_KEY, poll_s=0.5):
            try:
                self.position = decode(entry.value, TrainerPosition)
            except MessageError as error:
                self._log.error("trainer_position_unreadable", reason=str(error), remedy="update the older side")
                continue
            self.news.set()

    async def follow_evaluations(self) -> None:
        async for entry in self._node.kv.watch(self._bucket, EVAL_KEY, poll_s=0.5):
            self._note_evaluation(entry.value)

    async def read_evaluation(self) -> None:
        entry = await self._node.kv.get(self._bucket, EVAL_KEY)
        if entry is not None:
            self._note_evaluation(entry.value)

    def _note_evaluation(self, payload: bytes) -> None:
        try:
            report = decode(payload, EvalReport)
        except MessageError as error:
            self._log.error("evaluation_unreadable", reason=str(error), remedy="update the older side")
            return
        self.evaluation = HeldOutResult.of(report)

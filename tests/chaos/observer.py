"""Watches one node from outside, over its own connections, and keeps what the node's streams let
go.

Two independent sources. The logs: every scored group and every batch, read by sequence from the
first, so that a restart of the server loses none. The wire: acknowledgements that the server gave
to the generator and to the sampler, heard by listening to the replies; what passes while this
connection is away is missed, so that it can only say *at least these were acknowledged*. It also
hears the batches, because a first checkpoint lets the log forget what it contains at once.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import nats

from shared.cancelling import cancel_and_wait
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode
from shared.contracts.control import ServiceStatus, TaskLedger
from shared.contracts.messages import Batch, ScoredGroup
from shared.identity.permissions import inbox
from shared.transport.base import Transport, TransportError
from shared.transport.connect import connect

T = TypeVar("T")
POLL_S = 0.2
MOST_EARLY = 1000


class Observer:
    """Runs an event loop in a thread of its own, so that tests stay plain code."""

    def __init__(self, url: str, node: str) -> None:
        self._url, self._node = url, node
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.scored: dict[int, ScoredGroup] = {}
        self.batches: dict[int, bytes] = {}
        self.acknowledged_groups: set[str] = set()
        """Group ids that the server told the generator it had stored."""
        self.publishes = 0
        """Groups on the wire, those sent again included."""
        self._waiting: dict[str, bytes] = {}
        """Groups and batches on the wire, by the subject of the answer."""
        self._early: dict[str, bytes] = {}
        """Answers to what has not been looked at yet, or is not watched."""
        self.transport: Transport = self.call(connect(url, name="observer", timeout_s=20.0))
        self._tap = self.call(self._listen())
        self._keeping = self.call(self._start_keeping())

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        """Do something on the observer's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        """Stop watching."""
        self.call(cancel_and_wait(*self._keeping))
        self.call(self._tap.close())
        self.call(self.transport.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def status(self, role: str) -> ServiceStatus | None:
        """Return the last status of a role's newest process; None while nobody answers."""
        try:
            entries, _ = self.call(self.transport.kv.newest(subjects.node_bucket(self._node), 1024, f"status.{role}."), 10.0)
        except (TransportError, TimeoutError):
            return None
        return max((decode(each.value, ServiceStatus) for each in entries), key=lambda each: each.updated_at, default=None)

    def ledger(self) -> TaskLedger:
        """The generator's ledger of draws."""
        entry = self.call(self.transport.kv.get(subjects.node_bucket(self._node), subjects.LEDGER_KEY))
        return TaskLedger() if entry is None else decode(entry.value, TaskLedger)

    def queued(self) -> int:
        """Local groups that are not scored yet."""
        return self.call(self.transport.stream_state(subjects.node_rollouts_stream(self._node))).messages

    def stored_groups(self) -> int:
        """Local groups that the work queue ever took."""
        return self.call(self.transport.stream_state(subjects.node_rollouts_stream(self._node))).last_seq

    def caught_up(self) -> bool:
        """Return whether every position of both logs was read."""
        for stream, kept in ((subjects.node_scored_stream, self.scored), (subjects.node_batches_stream, self.batches)):
            if self.call(self.transport.stream_state(stream(self._node))).last_seq > max(kept, default=0):
                return False
        return True

    def numbered_batches(self) -> list[Batch]:
        """All batches in the order of the log."""
        return [decode(self.batches[seq], Batch) for seq in sorted(self.batches)]

    async def _start_keeping(self) -> list[asyncio.Task[None]]:
        """The tasks that copy the two logs: made on the observer's loop, which they are cancelled
        on.
        """
        return [
            asyncio.create_task(self._keep(subjects.node_scored_stream(self._node), self._keep_scored)),
            asyncio.create_task(self._keep(subjects.node_batches_stream(self._node), self._keep_batch)),
        ]

    async def _listen(self) -> Any:
        client = await nats.connect(self._url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_quiet)

        # Each subscription has a task of its own, so an answer may be looked at before what it
        # answers.
        async def published(message: Any) -> None:
            self.publishes += message.subject == subjects.node_rollouts(self._node)
            if message.reply in self._early:
                self._acknowledge(bytes(message.data), self._early.pop(message.reply))
            elif message.reply:
                self._waiting[message.reply] = bytes(message.data)

        async def answered(message: Any) -> None:
            payload = self._waiting.pop(message.subject, None)
            if payload is not None:
                self._acknowledge(payload, bytes(message.data))
                return
            self._early[message.subject] = bytes(message.data)
            if len(self._early) > MOST_EARLY:
                del self._early[next(iter(self._early))]

        await client.subscribe(subjects.node_rollouts(self._node), cb=published)
        await client.subscribe(subjects.node_batches(self._node), cb=published)
        await client.subscribe(f"{inbox(self._node, '*')}.>", cb=answered)
        return client

    def _acknowledge(self, payload: bytes, answer: bytes) -> None:
        told = json.loads(answer)
        # A refusal names the stream too, with 0 as its place.
        if not told.get("seq") or told.get("error") or told.get("duplicate"):
            return
        if told["stream"] == subjects.node_batches_stream(self._node):
            self.batches.setdefault(told["seq"], payload)
        else:
            self.acknowledged_groups.add(content_id(payload))

    async def _keep(self, stream: str, keep: Any) -> None:
        seq = 1
        while True:
            try:
                for message in await self.transport.read(stream, seq, 256):
                    keep(message.seq, await self.transport.payload(message))
                    seq = message.seq + 1
            except TransportError:
                pass
            await asyncio.sleep(POLL_S)

    def _keep_scored(self, seq: int, payload: bytes) -> None:
        self.scored[seq] = decode(payload, ScoredGroup)

    def _keep_batch(self, seq: int, payload: bytes) -> None:
        self.batches[seq] = payload


async def _quiet(error: Exception) -> None:
    """Restarts of the server are what these tests are about."""


def resident_bytes(pid: int) -> int:
    """Memory of a process, in bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def seconds_since(moment: float) -> float:
    """Seconds since `time.monotonic()` was `moment`."""
    return time.monotonic() - moment

"""Finds local groups that have used up their deliveries, which the server no longer delivers, and
makes them dead letters.
"""

from __future__ import annotations

import asyncio
import time

from services.verifier.figures import Figures
from services.verifier.local_outcomes import LocalOutcomes
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import decode
from shared.contracts.messages import RolloutGroup
from shared.contracts.wire import MessageError
from shared.dead_letters import spent_seq
from shared.runtime.logs import Log
from shared.transport.base import NotConnected, StoredMessage, Transport, TransportError

NOTICES_PERIOD_S = 2.0
SWEPT = 16
"""Number of oldest groups that one sweep examines."""


class SpentGroups:
    """Handles groups that have used up their deliveries."""

    def __init__(self, config: NodeConfig, node: Transport, scored: LocalOutcomes, figures: Figures, log: Log) -> None:
        self._config, self._id, self._node = config, config.node.id, node
        self._scored, self._figures, self._log = scored, figures, log
        self._seen_since: dict[int, float] = {}

    async def sweep(self) -> None:
        """Keep making dead letters of groups that have used up their deliveries and remain only in
        the stream. Never returns.
        """
        period_s = max(5.0, self._config.verifier.ack_wait_s / 2)
        swept_s = time.monotonic()
        while True:
            await asyncio.sleep(NOTICES_PERIOD_S)
            try:
                await self.put_away_spent()
                if time.monotonic() - swept_s >= period_s:
                    swept_s = time.monotonic()
                    await self.sweep_once(time.time())
            except TransportError as error:
                self._log.warning("sweep_delayed", reason=str(error))

    async def put_away_spent(self) -> int:
        """Make dead letters of the groups that the server's stored notices name. Returns their
        number.
        """
        stream, notices_stream = subjects.node_rollouts_stream(self._id), subjects.node_spent_stream(self._id)
        notices = await self._node.read(notices_stream, 1, SWEPT)
        count = 0
        for notice in notices:
            message = await self._node.get(stream, spent_seq(notice.inline or b""))
            # If the message is younger than the notice, the stream was created anew.
            if message is not None and message.stored_at < notice.stored_at:
                await self.put_away(stream, message)
                count += 1
        if notices:
            await self._node.purge(notices_stream, notices[-1].seq)
        return count

    async def sweep_once(self, now_s: float) -> int:
        """Make dead letters of groups that were delivered and not settled for longer than all their
        attempts can take. Returns their number.

        This covers groups without an advisory, which the server sends only when a client requests
        more. A consumer delivers in order, so all but the newest `pending` were delivered at least
        once.
        """
        stream = subjects.node_rollouts_stream(self._id)
        state = await self._node.stream_state(stream)
        lag = await self._node.consumer_state(stream, subjects.VERIFIER_CONSUMER)
        handed_out = min(state.messages - lag.pending, SWEPT)
        messages = await self._node.read(stream, state.first_seq, handed_out) if handed_out > 0 else []
        self._seen_since = {message.seq: self._seen_since.get(message.seq, now_s) for message in messages}
        longest_s = self._config.verifier.ack_wait_s * self._config.verifier.max_deliver
        expired = [message for message in messages if now_s - self._seen_since[message.seq] > longest_s]
        for message in expired:
            await self.put_away(stream, message)
        return len(expired)

    async def put_away(self, stream: str, message: StoredMessage) -> None:
        """Remove one group from the queue: it is stored as failed, and its bytes become a dead
        letter.
        """
        unreadable = ""
        try:
            payload = await self._node.payload(message)
        except NotConnected:
            raise
        except TransportError as error:
            payload, unreadable = b"", str(error)
        try:
            await self._scored.give_up(message, decode(payload, RolloutGroup), payload, "handed out too often")
        except MessageError as error:
            self._log.error("local_group_given_up", seq=message.seq, cause=unreadable or str(error))
            await self._scored.bury(message, payload, unreadable or str(error))
            self._figures.scoring.failed_local()
        await self._node.delete(stream, message.seq)

"""Sends own groups to the swarm, from a bounded queue, so that an outage of the swarm plane never stops the node."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from services.verifier.figures import Figures
from services.verifier.sharing_rules import is_shared, sign
from services.verifier.swarm_link import SwarmLink
from shared import subjects
from shared.config.sections import VerifierSection
from shared.keys import SigningKey
from shared.messages import RolloutGroup, content_id, encode
from shared.transport.base import TooLarge, TransportError

MAX_GROUPS = 512
MAX_BYTES = 128 * 2**20
RETRY_S = 1.0


class Outbox:
    """Groups on their way to the swarm; the oldest is dropped, and counted, when there are too many."""

    def __init__(self, config: VerifierSection, key: SigningKey, link: SwarmLink, figures: Figures, log: Any) -> None:
        self._config = config
        self._key = key
        self._link = link
        self._figures = figures
        self._log = log
        self._waiting: deque[tuple[str, str, bytes]] = deque()
        self._size_bytes = 0
        self._filled = asyncio.Event()

    def offer(self, group: RolloutGroup, rewards: list[float]) -> None:
        """Queue a scored group if the share policy wants it. Never waits."""
        if not is_shared(self._config.share, rewards):
            return
        signed = sign(group, self._key, share_tokens=self._config.share_tokens)
        payload = encode(signed)
        self._waiting.append((subjects.rollouts(group.node, group.task.ref.dataset), content_id(signed.body), payload))
        self._size_bytes += len(payload)
        while len(self._waiting) > MAX_GROUPS or (self._size_bytes > MAX_BYTES and len(self._waiting) > 1):
            self._remove_first()
            self._figures.share_dropped()
        self._figures.outbox(len(self._waiting))
        self._filled.set()

    async def run(self) -> None:
        """Publish what is queued, in order, for ever."""
        while True:
            await self._filled.wait()
            if not self._waiting:
                self._filled.clear()
                continue
            if self._link.transport is None or not await self._publish_first():
                await asyncio.sleep(RETRY_S)

    async def _publish_first(self) -> bool:
        transport = self._link.transport
        if transport is None:
            return False
        first = self._waiting[0]
        subject, message_id, payload = first
        try:
            await transport.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=message_id)
        except TooLarge as error:
            self._log.warning(
                "share_too_large", reason=str(error), remedy="lower generator.max_new_tokens or set share_tokens false"
            )
            self._figures.share_dropped()
        except TransportError as error:
            self._log.debug("share_delayed", reason=str(error))
            return False
        else:
            self._figures.shared()
        # While publishing, the queue may have overflowed and dropped this very entry.
        if self._waiting and self._waiting[0] is first:
            self._remove_first()
        self._figures.outbox(len(self._waiting))
        return True

    def _remove_first(self) -> None:
        self._size_bytes -= len(self._waiting.popleft()[2])

"""Sends local groups to the swarm from a bounded queue, so that an outage of the swarm plane never
stops the node.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import NamedTuple

from services.verifier.figures import Figures
from services.verifier.sharing_rules import is_shared, message_id, sign
from services.verifier.swarm_link import SwarmLink
from shared.config.sections import VerifierSection
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.contracts.limits import SWARM_LIMITS
from shared.contracts.messages import RolloutGroup
from shared.contracts.rollout_id import ROLLOUT_ID_HEADER, rollout_id_of
from shared.contracts.wire import DEFAULT_SWARM_ID
from shared.identity.keys import SigningKey
from shared.runtime import spans
from shared.runtime.logs import Log
from shared.transport.base import TooLarge, TransportError

MAX_GROUPS = 512
MAX_BYTES = 128 * 2**20
RETRY_S = 1.0


class Parcel(NamedTuple):
    """A signed group waiting to be sent. `shared_id` is the id of the bytes that are sent, which
    differs from the local one if token ids are left out.
    """

    subject: str
    task: str
    policy_version: int
    group_id: str
    shared_id: str
    payload: bytes


class Outbox:
    """Groups waiting to be sent to the swarm. If there are too many, the oldest is dropped and
    counted.
    """

    def __init__(
        self,
        config: VerifierSection,
        key: SigningKey,
        link: SwarmLink,
        figures: Figures,
        log: Log,
        swarm_id: str = DEFAULT_SWARM_ID,
    ) -> None:
        self._config = config
        self._swarm_id = swarm_id
        self._key = key
        self._link = link
        self._figures = figures
        self._log = log
        self._waiting: deque[Parcel] = deque()
        self._size_bytes = 0
        self._filled = asyncio.Event()

    def offer(self, group: RolloutGroup, group_id: str, rewards: list[float]) -> None:
        """Queue a scored group if the share policy includes it. Never waits. `group_id` is its id
        on this node.
        """
        if not is_shared(self._config.share, rewards):
            return
        signed = sign(group, self._key, share_tokens=self._config.share_tokens, swarm_id=self._swarm_id)
        payload, task = encode(signed), group.task.ref.dataset
        subject, shared_id = subjects.rollouts(group.node), content_id(signed.body)
        self._waiting.append(Parcel(subject, task, group.policy_version, group_id, shared_id, payload))
        self._size_bytes += len(payload)
        while len(self._waiting) > MAX_GROUPS or (self._size_bytes > MAX_BYTES and len(self._waiting) > 1):
            self._remove_first()
            self._figures.border.share_dropped()
        self._figures.border.outbox(len(self._waiting))
        self._filled.set()

    async def run(self) -> None:
        """Publish the queued groups in order. Never returns."""
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
        started, rollout_id = time.monotonic(), rollout_id_of(first.group_id)
        # Other nodes can know the group only by the bytes that they are sent.
        headers = {ROLLOUT_ID_HEADER: rollout_id_of(first.shared_id)}
        try:
            _check_size(first.payload)
            ack = await transport.publish(
                first.subject,
                first.payload,
                stream=subjects.SWARM_ROLLOUTS,
                message_id=message_id(first.shared_id, self._key),
                headers=headers,
            )
        except TooLarge as error:
            remedy = "lower generator.max_new_tokens or set share_tokens false"
            self._log.warning("share_too_large", rollout_id=rollout_id, reason=str(error), remedy=remedy)
            self._figures.border.share_dropped()
        except TransportError as error:
            self._figures.border.publish.failed("error")
            self._log.debug("share_delayed", rollout_id=rollout_id, reason=str(error))
            return False
        else:
            seconds = time.monotonic() - started
            self._figures.border.shared(seconds, len(first.payload))
            spans.emit(first.group_id, spans.SHARE, seconds=seconds, same_as=first.shared_id, size_bytes=len(first.payload))
            self._log.info(
                "rollouts_shared",
                rollout_id=rollout_id,
                shared_rollout_id=headers[ROLLOUT_ID_HEADER],
                task=first.task,
                policy_version=first.policy_version,
                swarm_seq=ack.seq,
                duplicate=ack.duplicate,
                seconds=round(seconds, 4),
            )
        # While publishing, the queue may have overflowed and dropped this very entry.
        if self._waiting and self._waiting[0] is first:
            self._remove_first()
        self._figures.border.outbox(len(self._waiting))
        return True

    def _remove_first(self) -> None:
        self._size_bytes -= len(self._waiting.popleft().payload)


def _check_size(payload: bytes) -> None:
    """Raises TooLarge. A member may not ask a secured server what its stream takes, which then
    stores the chunks of a larger group before anybody refuses it.
    """
    most = SWARM_LIMITS.group_max_bytes
    if len(payload) > most:
        raise TooLarge(f"stream {subjects.SWARM_ROLLOUTS} accepts payloads up to {most} bytes, this one has {len(payload)}", most)

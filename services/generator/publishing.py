"""Stores groups in the node's queue, which slows the generator down when it is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from services.generator.figures import Figures
from shared.cancelling import together
from shared.contracts.codec import content_id, encode
from shared.contracts.messages import ROLLOUT_ID_HEADER, RolloutGroup, rollout_id_of
from shared.contracts.subjects import node_rollouts, node_rollouts_stream
from shared.runtime import ServiceContext, spans
from shared.transport.base import NotConnected, StreamFull, TransportError


class GroupPublisher:
    """Publishes a node's groups under the number of their draw, so that none is stored twice."""

    def __init__(self, node: str, context: ServiceContext, figures: Figures) -> None:
        self._node, self._context, self._figures = node, context, figures

    async def publish_all(self, groups: Iterable[RolloutGroup], generate_s: float) -> None:
        """Store several groups at once. If one cannot be stored, none is still being sent when that
        is raised.
        """
        await together(*(self.publish(group, generate_s) for group in groups))

    async def publish(self, group: RolloutGroup, generate_s: float) -> None:
        """Store a group. If the queue is full or the server unreachable, this waits and loses
        nothing.
        """
        payload = encode(group)
        group_id = content_id(payload)
        rollout_id = rollout_id_of(group_id)
        while True:
            started = time.monotonic()
            try:
                ack = await self._context.node.publish(
                    node_rollouts(self._node),
                    payload,
                    stream=node_rollouts_stream(self._node),
                    message_id=f"draw-{group.draw}",
                    headers={ROLLOUT_ID_HEADER: rollout_id},
                )
            except (StreamFull, NotConnected) as error:
                self._figures.publish.failed("held_back" if isinstance(error, StreamFull) else "error")
                self._context.status.state("held back")
                self._context.log.info("held_back", rollout_id=rollout_id, draw=group.draw, reason=str(error))
                await asyncio.sleep(0.5)
            except TransportError:
                self._figures.publish.failed("error")
                raise
            else:
                break
        self._context.status.state("generating")
        self._figures.publish.stored(time.monotonic() - started, len(payload))
        spans.emit(
            group_id,
            spans.GENERATE,
            seconds=generate_s + time.monotonic() - started,
            task=group.task.ref.dataset,
            draw=group.draw,
            policy_version=group.policy_version,
            completions=len(group.completions),
        )
        self._context.log.info(
            "rollouts_published",
            rollout_id=rollout_id,
            task=group.task.ref.dataset,
            draw=group.draw,
            policy_version=group.policy_version,
            stream_seq=ack.seq,
            duplicate=ack.duplicate,
            completions=len(group.completions),
            tokens=sum(completion.token_count for completion in group.completions),
            seconds=round(generate_s, 4),
        )

"""A call of several parts of which one fails leaves none of the others running."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from services.generator.engines import Sample, SamplingParams
from services.generator.figures import Figures
from services.generator.groups import GroupPublisher, rollout_group
from services.generator.tasks import PromptedTask
from services.sampler.logs import ScoredLog
from shared.contracts.messages import RolloutGroup, TaskRef
from shared.contracts.wire import ModelIdentity
from shared.runtime.status import StatusBoard
from shared.tasks.prompt import text_task
from shared.transport.base import NotConnected, StreamFull, TooLarge


class Node:
    """In place of the node plane: the first group is too large, for others there is no room; the
    second message is not had, the others take for ever.
    """

    def __init__(self) -> None:
        self.publishing = 0

    async def publish(self, *_: Any, message_id: str, **__: Any) -> None:
        self.publishing += 1
        raise TooLarge("too large", 1) if message_id == "draw-0" else StreamFull("full")

    async def get(self, _stream: str, seq: int) -> None:
        if seq == 2:
            raise NotConnected("away")
        await asyncio.sleep(3600)


def group(draw: int) -> RolloutGroup:
    task = PromptedTask(text_task(TaskRef(dataset="gcd", seed=1, index=0), "gcd?", "3"), [5])
    samples = [Sample((1,), "7", "stop", (-1.0,))]
    model = ModelIdentity(name="tiny", tokenizer_hash="0" * 64)
    return rollout_group(task, samples, node="a", draw=draw, model=model, params=SamplingParams(), created_at=1.0)


async def test_a_group_that_is_too_large_leaves_no_publisher_of_the_others_behind() -> None:
    status, node = StatusBoard("a", "generator", "0"), Node()
    context: Any = SimpleNamespace(node=node, status=status, log=structlog.get_logger())
    publisher = GroupPublisher("a", context, Figures(CollectorRegistry(), status, ["gcd"]))
    before = asyncio.all_tasks()
    for _ in range(3):
        with pytest.raises(TooLarge):
            await publisher.publish_all([group(1), group(0)], 0.0)
    assert node.publishing == 6
    assert asyncio.all_tasks() == before


async def test_a_group_that_is_not_had_leaves_no_request_for_the_others_behind() -> None:
    transport: Any = Node()
    before = asyncio.all_tasks()
    entries: Any = [SimpleNamespace(seq=seq) for seq in (1, 2, 3)]
    with pytest.raises(NotConnected):
        await ScoredLog(transport, "a").payloads(entries)
    assert asyncio.all_tasks() == before

"""What tests of verifiers need: a node's configuration, groups made by hand, and a whole verifier
that runs in this process.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from services.verifier.service import VerifierService
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode, pack_ids, pack_logprobs
from shared.contracts.control import ForeignDemand
from shared.contracts.messages import Completion, RolloutGroup, Sampling, ScoredGroup
from shared.contracts.streams import prepare_node_streams, prepare_swarm_streams
from shared.contracts.wire import ModelIdentity
from shared.runtime import ServiceContext
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.runtime.status import StatusBoard
from shared.tasks.derive import derive_task, task_ref
from shared.transport.base import Transport
from tests.constants import load_with_constants
from tests.nats_server import NatsServer

MakeServer = Callable[..., NatsServer]
TASKS = [{"dataset": "gcd"}, {"dataset": "simple_integration"}]


def configured(
    node: str,
    url: str,
    folder: Path,
    swarm_url: str | None = None,
    tasks: Sequence[dict[str, str]] = TASKS,
    **verifier: object,
) -> NodeConfig:
    """One worker, because each takes most of a second of a core to start."""
    return load_with_constants(
        {
            "node": {"id": node, "var_dir": folder},
            "nats": {"node_url": url, "swarm_url": swarm_url or url},
            "tasks": list(tasks),
            "eval": {"tasks": 10},
            "verifier": {"intake_poll_s": 0.05, "answer_timeout_s": 1.5, "ack_wait_s": 5.0, "workers": 1, **verifier},
        }
    )


def group(node: str, index: int, answers: list[str] | None = None, **changes: object) -> RolloutGroup:
    """A group of a task that no other node and index has."""
    task = derive_task(
        task_ref(dataset="gcd", seed=100_000 * (zlib.crc32(node.encode()) % 10_000) + 500 * (index // 400), index=index % 400)
    )
    completions = [
        Completion(
            text=f"<answer>{text}</answer>",
            finish_reason="stop",
            token_count=2,
            token_ids=pack_ids([7, 0]),
            behaviour_logprobs=pack_logprobs([-1.0, -0.1]),
        )
        for text in answers or [str(task.answer), "wrong"]
    ]
    whole = RolloutGroup(
        node=node,
        created_at=time.time(),
        draw=index,
        task=task,
        completions=completions,
        model=ModelIdentity(name="tiny", tokenizer_hash="a" * 64),
        policy_version=3,
        sampling=Sampling(),
    )
    return msgspec.structs.replace(whole, **changes)


@dataclass
class RunningVerifier(ServiceContext):
    """`swarm`: a connection of the test's own, if the node has the swarm at its own server."""

    swarm: Transport | None = None


@asynccontextmanager
async def verifier(config: NodeConfig, wants: int = 100_000) -> AsyncIterator[RunningVerifier]:
    """A running verifier, stopped in order at the end; its failure is the test's. `wants`: foreign
    groups, as its sampler would say.
    """
    node = await connect_node_plane(config, "verifier")
    await prepare_node_streams(node, config.node.id, create=config.nats.create_streams)
    sampler = await connect_node_plane(config, "sampler")  # with its own key, which alone may say that
    await want(sampler, config.node.id, wants)
    await sampler.close()
    swarm = None
    if config.nats.swarm_url == config.nats.node_url:
        swarm = await connect_swarm_plane(config, "verifier", timeout_s=5.0)
        await prepare_swarm_streams(swarm, create=config.nats.create_streams)
    board = StatusBoard(config.node.id, "verifier", "0", config.node.role_names)
    log = structlog.get_logger("verifier")
    context = RunningVerifier(config, "verifier", "0", node, log, CollectorRegistry(), board, asyncio.Event(), swarm=swarm)
    running = asyncio.create_task(VerifierService(config).run(context))
    try:
        await until(lambda: context.ready or running.done())
        yield context
        context.stopping.set()
        await asyncio.wait_for(running, 4.0)
    finally:
        await cancel_and_wait(running)
        await node.close()
        if swarm is not None:
            await swarm.close()


async def want(node: Transport, node_id: str, groups: int, scored_seq: int = 0) -> None:
    """Say as a sampler how many foreign groups are wanted."""
    demand = ForeignDemand(groups=groups, scored_seq=scored_seq)
    await node.kv.put(subjects.node_bucket(node_id), subjects.DEMAND_KEY, encode(demand))


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        met = condition()
        if met if isinstance(met, bool) else await met:
            return
        assert time.monotonic() < deadline, "did not come about in time"
        await asyncio.sleep(0.05)


async def generate(transport: Transport, *groups: RolloutGroup) -> None:
    for each in groups:
        payload = encode(each)
        stream = subjects.node_rollouts_stream(each.node)
        await transport.publish(subjects.node_rollouts(each.node), payload, stream=stream, message_id=content_id(payload))


async def scored(transport: Transport, node: str) -> list[ScoredGroup]:
    messages = await transport.read(subjects.node_scored_stream(node), 1, 1000)
    return [decode(await transport.payload(message), ScoredGroup) for message in messages]


async def queue_is_empty(transport: Transport, node: str) -> bool:
    return (await transport.stream_state(subjects.node_rollouts_stream(node))).messages == 0

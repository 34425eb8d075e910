"""What a node keeps in its bucket for its own services may be damaged or of an earlier form: that
is said, and the service goes on.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
import structlog
from prometheus_client import CollectorRegistry

from services.generator.evaluation import Evaluator
from services.generator.figures import Figures as GeneratorFigures
from services.trainer.durable.publish import Publisher
from services.verifier.figures import Figures as VerifierFigures
from services.verifier.swarm_reader import SwarmReader
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, EvalTurn, IntakeCursor
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.contracts.wire import MessageError
from shared.runtime import ServiceContext
from shared.runtime.status import StatusBoard
from shared.transport.memory.server import MemoryServer
from shared.transport.memory.transport import MemoryTransport

BUCKET = subjects.node_bucket("alpha")


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(node={"id": "alpha", "var_dir": tmp_path}, tasks=[{"dataset": "gcd"}], eval={"every_versions": 2})


async def node() -> MemoryTransport:
    transport = MemoryTransport(MemoryServer())
    await ensure_node_streams(transport, "alpha")
    await ensure_swarm_streams(transport)
    return transport


@pytest.mark.parametrize("older", [b"4 alpha-0", b"\xff\xff", b""])
async def test_a_turn_that_nobody_can_read_is_taken_anew(config: NodeConfig, older: bytes) -> None:
    transport = await node()
    figures = GeneratorFigures(CollectorRegistry(), StatusBoard("alpha", "generator", "alpha-0"), ["gcd"])
    context = ServiceContext(
        config=config,
        role="generator",
        replica="alpha-0",
        node=transport,
        swarm=None,
        log=structlog.get_logger("generator"),
        registry=CollectorRegistry(),
        status=StatusBoard("alpha", "generator", "alpha-0"),
        stopping=asyncio.Event(),
    )
    engine = cast("Any", SimpleNamespace(policy_version=4))  # all that is asked of it here
    evaluator = Evaluator(context, config.tasks, engine, [], figures)
    await transport.kv.put(BUCKET, subjects.EVAL_TURN_KEY, older)
    assert await evaluator._due(), "nothing was evaluated yet"
    report = EvalReport(
        node="alpha", policy_version=4, created_at=1.0, n=1, pass_rate=0.0, mean_reward=0.0, per_task={}, seconds=1.0
    )
    await transport.kv.put(BUCKET, subjects.EVAL_KEY, encode(report))
    assert not await evaluator._due(), "the report says that version 4 has had its evaluation"
    engine.policy_version = 6
    assert await evaluator._due() and await evaluator._take_turn(6)
    entry = await transport.kv.get(BUCKET, subjects.EVAL_TURN_KEY)
    assert entry is not None and decode(entry.value, EvalTurn) == EvalTurn(policy_version=6, replica="alpha-0")


@pytest.mark.parametrize("older", [msgpack.packb(2), b"\xff\xff", b""])
async def test_a_cursor_that_nobody_can_read_begins_the_stream_again(config: NodeConfig, older: bytes) -> None:
    transport = await node()
    subject = subjects.rollouts("beta")
    for number in range(3):
        await transport.publish(subject, b"%d" % number, stream=subjects.SWARM_ROLLOUTS, message_id=f"m{number}")
    await transport.kv.put(BUCKET, subjects.INTAKE_KEY, older)
    reader = SwarmReader(config, transport, VerifierFigures(CollectorRegistry(), StatusBoard("alpha", "verifier", "0")))
    messages, more = await reader.read(transport)
    assert ([message.seq for message in messages], more) == ([1, 2, 3], False)
    entry = await transport.kv.get(BUCKET, subjects.INTAKE_KEY)
    assert entry is not None and decode(entry.value, IntakeCursor).position == 3
    assert await reader.read(transport) == ([], False)


@pytest.mark.parametrize("older", [msgpack.packb({"schema": 1, "version": 1}), b"\xff\xff", b""])
async def test_a_pointer_that_nobody_can_read_is_written_anew_unless_a_later_version_wrote_it(tmp_path: Path, older: bytes) -> None:
    transport = await node()
    publisher = Publisher(cast("Any", None), transport, node="alpha", staging=tmp_path, keep=1)  # reading asks no store
    await transport.kv.put(BUCKET, subjects.POLICY_KEY, older)
    await publisher.read_pointer()
    assert publisher.pointer is None
    await transport.kv.put(BUCKET, subjects.POLICY_KEY, msgpack.packb({"schema": 2}))
    with pytest.raises(MessageError, match="schema_version"):
        await publisher.read_pointer()

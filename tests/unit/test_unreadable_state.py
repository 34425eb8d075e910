"""What a node keeps in its bucket for its own services may be damaged or of an earlier form: that
is said, and the service goes on.

The evaluator is the real one; its engine and its scorers are stand-ins that give one fixed answer
and reward, because what is asked here is what it does with its bucket and its file.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import msgspec
import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.generator.engines.base import Sample
from services.generator.evaluation import Evaluator, _Answers, eval_line
from services.generator.figures import Figures as GeneratorFigures
from services.generator.ledger import DrawLedger
from services.sampler.service import SamplerService
from services.trainer.step_publisher import Publisher
from services.verifier.figures import Figures as VerifierFigures
from services.verifier.swarm_reader import SwarmReader
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, EvalTurn, IntakeCursor
from shared.contracts.messages import TaskRef
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.contracts.wire import MessageError
from shared.rewards import Mark
from shared.run_records import read_jsonl
from shared.runtime import FatalError, ServiceContext
from shared.runtime.status import StatusBoard
from shared.tasks import derive_task
from shared.tasks.prompt import text_task
from shared.tasks.sandbox import JobResult
from shared.transport.base import Deadline, Transport, bucket_stream
from shared.transport.nats.jetstream_api import call
from shared.transport.nats.transport import connection_of
from tests.full_disk import no_file_above
from tests.integration.running_verifier import until
from tests.nats_server import own_plane

BUCKET = subjects.node_bucket("alpha")


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(node={"id": "alpha", "var_dir": tmp_path}, tasks=[{"dataset": "gcd"}], eval={"every_versions": 2})


async def node() -> Transport:
    transport = await own_plane()
    await ensure_node_streams(transport, "alpha")
    await ensure_swarm_streams(transport)
    return transport


def counting_engine(generate: Any, turn: Any) -> Any:
    """All that an evaluation asks of an engine."""
    counts = {"completions_ended": 0, "tokens_sampled": 0}
    return SimpleNamespace(policy_version=0, loads_policies=True, generate=generate, turn=turn, **counts)


def an_evaluator(config: NodeConfig, transport: Transport, engine: Any, *tasks: Any) -> Evaluator:
    board = StatusBoard("alpha", "generator", "alpha-0")
    context = ServiceContext(
        config=config,
        role="generator",
        replica="alpha-0",
        node=transport,
        log=structlog.get_logger("generator"),
        registry=CollectorRegistry(),
        status=board,
        stopping=asyncio.Event(),
    )
    return Evaluator(context, config, engine, tasks, GeneratorFigures(CollectorRegistry(), board, ["gcd"]))


def a_report(version: int) -> EvalReport:
    return EvalReport(
        node="alpha", policy_version=version, created_at=1.0, n=1, pass_rate=0.0, mean_reward=0.0, per_task={}, seconds=1.0
    )


@pytest.mark.parametrize("older", [b"4 alpha-0", b"\xff\xff", b""])
async def test_a_turn_that_nobody_can_read_is_taken_anew(config: NodeConfig, older: bytes) -> None:
    transport = await node()
    engine = cast("Any", SimpleNamespace(policy_version=4))  # all that is asked of it here
    evaluator = an_evaluator(config, transport, engine)
    await transport.kv.put(BUCKET, subjects.EVAL_TURN_KEY, older)
    assert await evaluator._due(), "nothing was evaluated yet"
    await transport.kv.put(BUCKET, subjects.EVAL_KEY, encode(a_report(4)))
    assert not await evaluator._due(), "the report says that version 4 has had its evaluation"
    engine.policy_version = 6
    assert await evaluator._due() and await evaluator._take_turn(6)
    entry = await transport.kv.get(BUCKET, subjects.EVAL_TURN_KEY)
    assert entry is not None and decode(entry.value, EvalTurn) == EvalTurn(policy_version=6, replica="alpha-0")


@pytest.mark.parametrize(("scorer", "base"), [("b" * 64, 0.25), ("c" * 64, None), (None, None)])
async def test_the_base_score_of_alerts_is_by_the_newest_reports_scorers(
    config: NodeConfig, scorer: str | None, base: float | None
) -> None:
    config.node.run_dir.mkdir(parents=True, exist_ok=True)
    line = eval_line(msgspec.structs.replace(a_report(0), pass_rate=0.25, held_out="a" * 64, scorer="b" * 64))
    (config.node.run_dir / "eval.jsonl").write_text(json.dumps(line) + "\n")
    evaluator = an_evaluator(config, await node(), None)
    evaluator._show(msgspec.structs.replace(a_report(0), pass_rate=0.25, held_out="a" * 64, scorer="b" * 64))
    assert evaluator._figures._base_pass_ratio._value == 0.25
    evaluator._show(msgspec.structs.replace(a_report(4), pass_rate=0.5, held_out="a" * 64, scorer=scorer))
    assert evaluator._figures._base_pass_ratio._value == base


@pytest.mark.parametrize("older", [msgpack.packb({"schema": 1}), b"\xff\xff", b""])
async def test_a_result_that_nobody_can_read_is_found_again(config: NodeConfig, older: bytes) -> None:
    transport = await node()
    await transport.kv.put(BUCKET, subjects.EVAL_KEY, older)
    turns: list[int] = []

    async def generate(*asked: Any, **settings: Any) -> list[list[Any]]:
        turns.append(1)
        return [[Sample((1, 2), "an answer", "stop", None)]]

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        yield

    engine = counting_engine(generate, turn)
    task = text_task(TaskRef(dataset="gcd", seed=1, index=1), "q", "1")
    evaluator = an_evaluator(config, transport, engine, SimpleNamespace(task=task, prompt_ids=[1]))
    await evaluator.begin()
    assert turns == [1], "the base policy answers, as it does where nothing was evaluated yet"


async def test_an_evaluations_seconds_are_those_of_generating_and_of_scoring(config: NodeConfig) -> None:
    """The stand-in engine sleeps, as one that takes a known time cannot be had."""
    transport, took_s = await node(), []

    async def generate(*asked: Any, **settings: Any) -> list[list[Any]]:
        began = time.monotonic()
        await asyncio.sleep(0.05)  # an engine's work
        took_s.append(time.monotonic() - began)
        return [[Sample((1, 2), "an answer", "stop", None)]]

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        yield

    async def score(*asked: Any) -> list[JobResult]:
        return [JobResult([1.0], None, None, "", 0, 0.0, marks=[Mark.UNSAID])]

    engine = counting_engine(generate, turn)
    task = SimpleNamespace(prompt_ids=[1], task=text_task(TaskRef(dataset="gcd", seed=1, index=1), "q", "1"))
    evaluator = an_evaluator(config, transport, engine, task)
    await evaluator._report(await evaluator._answers(), cast("Any", SimpleNamespace(score=score)))
    (line,) = read_jsonl(config.node.run_dir / "eval.jsonl")
    assert line["seconds"] >= round(took_s[0], 3) - 0.001


async def test_an_evaluation_without_any_known_reward_has_a_line_and_its_policys_later_score_another(config: NodeConfig) -> None:
    marks, results = [Mark.RAISED, Mark.UNSAID], []

    async def score(*asked: Any) -> list[JobResult]:
        results.append(marks[len(results)])
        reward = None if results[-1] is Mark.RAISED else 1.0
        return [JobResult([reward], None, None, "raised ValueError", 0, 0.0, marks=[results[-1]])]

    task = SimpleNamespace(prompt_ids=[1], task=text_task(TaskRef(dataset="gcd", seed=1, index=1), "q", "1"))
    evaluator = an_evaluator(config, await node(), cast("Any", SimpleNamespace(policy_version=0)), task)
    answered = _Answers([Sample((1, 2), "an answer", "stop", None)], 0.1)
    for _ in marks:
        await evaluator._report(answered, cast("Any", SimpleNamespace(score=score)))
    unscored, scored = read_jsonl(config.node.run_dir / "eval.jsonl")
    assert (unscored["n"], unscored["unknown"], unscored["pass_rate"], unscored["mean_reward"]) == (0, 1, None, None)
    assert (scored["policy_version"], scored["n"], scored["unknown"], scored["pass_rate"]) == (0, 1, 0, 1.0)
    assert evaluator._figures._base_pass_ratio._value == 1.0


@pytest.mark.slow
async def test_what_the_base_policy_answered_is_reported_once_its_bucket_is_back(config: NodeConfig) -> None:
    transport, task = await node(), derive_task(TaskRef(dataset="gcd", config="{}", seed=1, index=1))
    engine = cast("Any", SimpleNamespace(policy_version=0))  # all that is asked of it here
    evaluator = an_evaluator(config, transport, engine, SimpleNamespace(prompt_ids=[1], task=task))
    evaluator._base_answers = _Answers([Sample((1, 2), f"<answer>{task.answer}</answer>", "stop", None)], 0.1)
    await call(connection_of(transport), f"STREAM.DELETE.{bucket_stream(BUCKET)}", None, Deadline(10), "delete")

    async def reported() -> bool:
        assert not running.done(), running
        return await transport.kv.get(BUCKET, subjects.EVAL_KEY) is not None

    with capture_logs() as logs:
        running = asyncio.create_task(evaluator.run())
        try:
            await until(lambda: running.done() or any(each["event"] == "evaluation_postponed" for each in logs))
            assert not running.done(), running
            await ensure_node_streams(transport, "alpha")
            await until(reported)
        finally:
            await cancel_and_wait(running)
    entry = await transport.kv.get(BUCKET, subjects.EVAL_KEY)
    assert entry is not None and decode(entry.value, EvalReport).pass_rate == 1.0
    assert len(read_jsonl(config.node.run_dir / "eval.jsonl")) == len(read_jsonl(config.node.run_dir / "samples.jsonl")) == 1


async def test_a_torn_line_of_evaluations_costs_that_line_alone(config: NodeConfig) -> None:
    evaluator = an_evaluator(config, await node(), cast("Any", SimpleNamespace(policy_version=0)))
    file = config.node.run_dir / "eval.jsonl"
    evaluator._lines.append(eval_line(a_report(0)))
    with file.open("a") as torn:
        torn.write('{"policy_version": 2, "pass_')  # killed while it wrote
    for version in (2, 4, 4):
        evaluator._lines.append(eval_line(a_report(version)))
    assert [line["policy_version"] for line in read_jsonl(file)] == [0, 2, 4]
    assert evaluator._pass_ratio_of_base(a_report(4)) == 0.0


async def test_an_evaluation_that_a_full_disk_refuses_leaves_no_torn_line_and_is_written_with_the_next(config: NodeConfig) -> None:
    evaluator = an_evaluator(config, await node(), cast("Any", SimpleNamespace(policy_version=0)))
    file = config.node.run_dir / "eval.jsonl"
    evaluator._lines.append(eval_line(a_report(0)))
    before = file.read_bytes()
    with no_file_above(len(before) + 40), capture_logs() as said:
        evaluator._lines.append(eval_line(a_report(2)))
    assert file.read_bytes() == before
    assert [(line["event"], line["kind"]) for line in said] == [("write_failed", "evaluation")]
    evaluator._lines.append(eval_line(a_report(4)))
    assert [line["policy_version"] for line in read_jsonl(file)] == [0, 2, 4]


@pytest.mark.parametrize("older", [msgpack.packb({"next_draw": "many"}), b"\xff\xff", b""])
async def test_a_ledger_of_draws_that_nobody_can_read_ends_the_generator_with_a_remedy(older: bytes) -> None:
    """Without it nobody knows which tasks were drawn."""
    transport = await node()
    await transport.kv.put(BUCKET, subjects.LEDGER_KEY, older)
    with pytest.raises(FatalError, match="ledger of task draws .* cannot be read .*: run all of the node's generators"):
        await DrawLedger(transport, "alpha", "alpha-0", 10.0).release_own()


@pytest.mark.parametrize("older", [msgpack.packb(2), b"\xff\xff", b""])
async def test_a_cursor_that_nobody_can_read_begins_the_stream_again(config: NodeConfig, older: bytes) -> None:
    transport = await node()
    subject = subjects.rollouts("beta")
    for number in range(3):
        await transport.publish(subject, b"%d" % number, stream=subjects.SWARM_ROLLOUTS, message_id=f"m{number}")
    await transport.kv.put(BUCKET, subjects.INTAKE_KEY, older)
    reader = SwarmReader(config, transport, VerifierFigures(CollectorRegistry(), StatusBoard("alpha", "verifier", "0")))
    (first, _), (others, _) = await reader.read(transport, 9, 0), await reader.read(transport, 9, 1)
    assert [message.seq for message in [*first, *others]] == [1, 2, 3]
    entry = await transport.kv.get(BUCKET, subjects.INTAKE_KEY)
    assert entry is not None and decode(entry.value, IntakeCursor).position == 3
    assert await reader.read(transport, 9, 0) == ([], False)


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


async def test_batches_of_an_older_version_end_the_sampler_which_says_what_to_choose(config: NodeConfig) -> None:
    transport = await node()
    older = msgpack.packb({"schema": 1, "number": 1, "items": [{"scored": {"schema": 1}}]})
    await transport.publish(subjects.node_batches("alpha"), older, stream=subjects.node_batches_stream("alpha"), message_id="1")
    board, log = StatusBoard("alpha", "sampler", "0"), structlog.get_logger("sampler")
    context = ServiceContext(
        config=config,
        role="sampler",
        replica="0",
        node=transport,
        log=log,
        registry=CollectorRegistry(),
        status=board,
        stopping=asyncio.Event(),
    )
    with pytest.raises(FatalError, match=r"schema_version: .* or choose another node\.id and node\.run"):
        await asyncio.wait_for(SamplerService(config).run(context), 60.0)

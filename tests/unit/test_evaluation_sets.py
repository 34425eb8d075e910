"""Evaluation sets: what is asked, what is kept out of training, avg@k and pass@k, and which version
is measured when. The server, the engine and the sandbox are real.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from services.generator.engines import SamplingParams, create_engine
from services.generator.engines.base import Engine
from services.generator.evaluation_sets import AskedSet, SetEvaluator
from services.generator.tasks import Prompter
from shared.config import ConfigError, NodeConfig, load_config
from shared.contracts.codec import encode
from shared.contracts.control import TrainerPosition
from shared.contracts.status_figures import EVALUATING_BASE, EVALUATING_LAST
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import TRAINER_KEY, node_bucket
from shared.model.reading import load_tokenizer
from shared.run_records import read_jsonl
from shared.runtime import ServiceContext
from shared.runtime.status import StatusBoard
from shared.tasks import TaskError, held_out_of, held_out_tasks
from shared.tasks.evaluation import Score, pass_at_k, standard_error, summarise
from shared.tasks.specs import checked_config
from shared.transport.base import Transport
from swarm_cli.observe.run_files import SetCurve, SetResult, read_sets, set_chance, set_lines
from swarm_cli.task_probe import SMALLER, begin_deriving
from tests.integration.running_verifier import until
from tests.nats_server import own_plane

MODEL = Path(__file__).resolve().parents[2] / "models" / "base"


def rows(file: Path, questions: range) -> str:
    lines = [json.dumps({"question": f"What is {number} + 1?", "answer": str(number + 1)}) for number in questions]
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def configured(folder: Path, asked: range = range(30, 50), **settings: Any) -> NodeConfig:
    """40 rows to train on, of which 8 are held out, and a set."""
    of_set = {"name": "late", "path": rows(folder / "set.jsonl", asked), "k": 2, "questions": 6, "verifier": "final_number"}
    tasks = [{"path": rows(folder / "train.jsonl", range(40)), "verifier": "final_number"}]
    sections: dict[str, Any] = {
        "node": {"var_dir": folder},
        "model": {"path": str(MODEL)},
        "generator": {"max_new_tokens": 4, "engine": "transformers"},
        "eval": {"tasks": 8, "sets": [{**of_set, **settings}]},
    }
    return checked_config(load_config(overrides={"tasks": tasks, **sections}, environment={}))


def held_out(config: NodeConfig) -> Any:
    return held_out_of(config.tasks, tasks=config.eval.tasks, sets=config.eval.sets, draw=config.eval.draw)


@pytest.mark.parametrize("passes", [(True, False, False, False), (True, True, False, True, False), (False,) * 4, (True,) * 3])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers(passes: tuple[bool, ...], k: int) -> None:
    answers: list[Score] = [(float(passed), passed) for passed in passes]
    chosen = [any(some) for some in combinations(passes, k)]
    assert pass_at_k([answers], k) == pytest.approx(sum(chosen) / len(chosen))


def test_unknown_rewards_shorten_a_question_and_a_reward_without_a_pass_has_no_pass_at_k() -> None:
    unknown: Score = (None, None)
    assert pass_at_k([[(1.0, True), unknown], [(0.0, False), unknown], [unknown, unknown]], 2) == 0.5
    assert pass_at_k([[unknown]], 1) is None
    assert pass_at_k([[(0.3, None), (0.4, None)]], 2) is None


def test_each_question_counts_once_in_avg_at_k_as_in_pass_at_k_however_many_of_its_rewards_are_known() -> None:
    unknown: Score = (None, None)
    questions: list[list[Score]] = [[(1.0, True)] * 4, [(0.0, False), unknown, unknown, unknown], [unknown] * 4]
    answers = [("gcd", *score) for answers in questions for score in answers]
    report = summarise(answers, k=4, node="eval", policy_version=0, created_at=0.0, seconds=0.0)
    assert (report.pass_rate, report.mean_reward, report.n, report.unknown) == (0.5, 0.5, 5, 7)
    assert pass_at_k(questions, 4) == 0.5


def test_the_chance_of_a_set_is_that_of_its_questions_and_smaller_where_answers_to_one_differ() -> None:
    def chance(error: float, questions: int = 50, k: int = 4) -> float:
        results = [SetResult(version, 0.5, questions * k, k=k, questions=questions, error=error, pass_at={}) for version in (0, 10)]
        found = set_chance(SetCurve(tuple(results), results[0]))
        assert found is not None
        return found

    alike, differing = chance((0.25 / 50) ** 0.5), chance((0.25 / 200) ** 0.5)
    assert alike == pytest.approx(2 * differing, rel=0.01)
    assert chance(0.0) == pytest.approx(differing, rel=0.01), "an error of nothing is none that was measured"


def test_the_error_is_of_questions_whose_answers_are_alike() -> None:
    alike: list[list[Score]] = [[(float(right), right)] * 4 for right in (True, False)] * 8
    assert standard_error(alike, passes=True) == pytest.approx((0.25 * 16 / 15) ** 0.5 / 4), "as of 16 answers, not of 64"
    assert standard_error(alike[:1], passes=True) == 0.0
    assert standard_error([[(0.5, None)], [(1.5, None)]], passes=False) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("sets", "setting"),
    [
        ([{"name": "a", "dataset": "gcd"}, {"name": "a", "dataset": "lcm"}], "eval.sets"),
        ([{"name": "a", "dataset": "gcd", "temperature": 0}], "[[eval.sets]] 1"),
        ([{"name": "a", "dataset": "gcd", "weight": 2}], "[[eval.sets]] 1"),
        ([{"dataset": "gcd"}], "[[eval.sets]] 1: name"),
        ([{"name": "a", "dataset": "gcd"}, {"name": "b", "path": "x.jsonl", "dataset": "X"}], "[[eval.sets]] 2"),
    ],
    ids=["names twice", "greedy copies", "a weight", "no name", "of a task source"],
)
def test_a_set_that_cannot_be_measured_is_refused_by_its_number(sets: list[dict[str, Any]], setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides={"tasks": [{"dataset": "gcd"}], "eval": {"sets": sets}}, environment={})
    assert any(setting in line for line in refused.value.faults), refused.value.faults


def test_the_reward_of_a_set_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def right(answer, reference):\n    return 1.0\n")
    rows(tmp_path / "set.jsonl", range(5))
    (tmp_path / "node.toml").write_text(
        f'[[tasks]]\ndataset = "gcd"\n[[eval.sets]]\nname = "a"\npath = "{tmp_path}/set.jsonl"\nreward = "rewards.py:right"\n'
    )
    (only,) = load_config(tmp_path / "node.toml", environment={}).eval.sets
    assert only.reward == f"{tmp_path}/rewards.py:right" and only.k == 4


def test_all_rows_of_a_set_are_left_out_of_training_and_the_held_out_tasks_stay_the_same(tmp_path: Path) -> None:
    config = configured(tmp_path)
    held = held_out(config)
    assert [task.key for task in held.tasks] == [task.key for task in held_out_tasks(config.tasks, 8)]
    assert len(held.sets["late"]) == 6, "as many as are asked"
    assert all(held.contains_text(f"what is {number} +  1?") for number in range(30, 50)), "and the rows that are not"
    assert held.rows_of_sets(config.tasks) == 10
    trained_on = [number for number in range(40) if not held.contains_text(f"What is {number} + 1?")]
    assert len(trained_on) >= 40 - 10 - 8 and max(trained_on) < 30


@pytest.mark.slow
def test_the_check_counts_rows_in_both_and_refuses_where_nothing_is_left_or_a_set_cannot_be_read(tmp_path: Path) -> None:
    def looked(asked: range, **settings: Any) -> tuple[list[str], int]:
        config = configured(tmp_path, asked)
        sets = [each.model_copy(update=settings) for each in config.eval.sets]
        derived = begin_deriving(config.tasks, config.eval.tasks, SMALLER, sets=sets)()
        return list(derived.problems), derived.rows_in_sets

    assert looked(range(30, 50)) == ([], 10)
    problems, _ = looked(range(40))
    assert len(problems) == 1 and "train.jsonl" in problems[0] and "[[eval.sets]]" in problems[0]
    problems, _ = looked(range(30, 50), path="gone.jsonl")
    assert len(problems) == 1 and problems[0].startswith("[[eval.sets]] 1: gone.jsonl")
    with pytest.raises(TaskError):
        held_out(configured(tmp_path, range(40)))


@asynccontextmanager
async def engine_of(config: NodeConfig) -> AsyncIterator[Engine]:
    engine = create_engine("transformers", config.model.path, max_model_len=100, threads=1, device="cpu")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def evaluator_of(
    config: NodeConfig, node: Transport, engine: Engine, swaps: asyncio.Lock, replica: str = "alpha-0"
) -> SetEvaluator:
    context = ServiceContext(
        config=config,
        role="generator",
        replica=replica,
        node=node,
        log=structlog.get_logger("generator"),
        registry=CollectorRegistry(),
        status=StatusBoard("alpha", "generator", replica),
        stopping=asyncio.Event(),
    )
    held = held_out(config)
    prompter = Prompter(config, load_tokenizer(config.model), 100, held)
    sets = [AskedSet(each, prompter.held_out(held.sets[each.name])) for each in config.eval.sets]
    return SetEvaluator(context, config, engine, sets, swaps)


async def measured(evaluator: SetEvaluator, config: NodeConfig, lines: int, version: int = 0) -> list[dict[str, Any]]:
    """Let it run until nothing is left to measure, and return its record."""
    running = asyncio.create_task(evaluator.run())
    file = config.node.run_dir / "eval_sets.jsonl"

    async def done() -> bool:
        return not await evaluator.left(version) and len(read_jsonl(file)) >= lines

    try:
        await until(done, 60.0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return read_jsonl(file)


@pytest.mark.slow
async def test_the_base_policy_is_measured_once_and_again_only_where_the_set_is_another(tmp_path: Path) -> None:
    config = configured(tmp_path)
    node = await own_plane()
    await ensure_node_streams(node, "alpha")
    async with engine_of(config) as engine:
        first = evaluator_of(config, node, engine, asyncio.Lock())
        await first.begin()
        assert await first.left(0), "it has answers that are not scored"
        killed = evaluator_of(config, node, engine, asyncio.Lock())
        await killed.begin()  # the process that had asked is gone, and with it the answers
        (line,) = await measured(killed, config, 1)
        assert (line["set"], line["policy_version"], line["k"], line["questions"]) == ("late", 0, 2, 6)
        assert line["n"] + line["unknown"] == 12 and set(line["pass_at"]) == {"1", "2"}
        assert line["pass_at"]["1"] == pytest.approx(line["pass_rate"]) and line["pass_at"]["2"] >= line["pass_at"]["1"]
        for replica in ("alpha-0", "alpha-1"):
            again = evaluator_of(config, node, engine, asyncio.Lock(), replica)
            await again.begin()
            assert not await again.left(0)
            assert len(await measured(again, config, 1)) == 1, "a restart and another replica ask nothing"
        other = configured(tmp_path, k=3)
        anew = evaluator_of(other, node, engine, asyncio.Lock())
        await anew.begin()
        both = await measured(anew, other, 2)
        assert [each["k"] for each in both] == [2, 3] and both[0]["held_out"] != both[1]["held_out"]


@pytest.mark.slow
async def test_while_the_base_policy_is_measured_the_state_says_how_far_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.generator.engine_calls._PROGRESS_S", 0.002)
    config, node = configured(tmp_path, questions=12, k=16), await own_plane()
    await ensure_node_streams(node, "alpha")
    async with engine_of(config) as engine:
        evaluator = evaluator_of(config, node, engine, asyncio.Lock())
        status, states = evaluator._context.status, []

        async def look() -> None:
            while True:
                states.append(status.snapshot().state)
                await asyncio.sleep(0.001)

        looking = asyncio.create_task(look())
        await evaluator.begin()
        looking.cancel()
    said = [re.fullmatch(f"{EVALUATING_BASE}: (\\d+) of 192 answers, ([\\d,]+) tokens", state) for state in dict.fromkeys(states)]
    answers, tokens = zip(*((int(each[1]), int(each[2].replace(",", ""))) for each in said if each), strict=True)
    assert len(tokens) > 3 and answers[-1] > 96, "of several calls"
    assert sorted(tokens) == list(tokens) and sorted(answers) == list(answers) and 0 < tokens[0] < tokens[-1] <= 192 * 4


@pytest.mark.slow
async def test_while_a_set_is_measured_groups_are_made_and_weights_stay_and_the_last_policy_is_always_measured(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path, questions=20, k=16, every_versions=5)
    node, swaps = await own_plane(), asyncio.Lock()
    await ensure_node_streams(node, "alpha")
    made: list[bool] = []

    async def generates() -> None:
        while True:
            await engine.generate([[1, 2, 3]], 2, SamplingParams(max_new_tokens=2), seed=0)
            made.append(swaps.locked())

    async with engine_of(config) as engine:
        evaluator = evaluator_of(config, node, engine, swaps)
        await evaluator.begin()
        await measured(evaluator, config, 1)
        generating = asyncio.create_task(generates())
        engine.policy_version = 3  # as after a swap, which the engine itself is not asked for here
        assert not await evaluator._due(evaluator._sets[0], 3, last=False), "not before every_versions"
        await node.kv.put(
            node_bucket("alpha"), TRAINER_KEY, encode(TrainerPosition(policy_version=3, consumed_local=0, finished=True))
        )
        lines = await measured(evaluator, config, 2, version=3)
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
    assert [line["policy_version"] for line in lines] == [0, 3]
    assert sum(made) >= 3, "training groups are made between the calls, while nobody may swap the weights"


@pytest.mark.slow
async def test_a_turn_from_before_a_restart_waits_for_its_weights_and_the_base_policy_is_not_asked_again(tmp_path: Path) -> None:
    config = configured(tmp_path, every_versions=5)
    node = await own_plane()
    await ensure_node_streams(node, "alpha")
    async with engine_of(config) as engine:
        stopped = evaluator_of(config, node, engine, asyncio.Lock())
        await stopped.begin()
        await measured(stopped, config, 1)
        engine.policy_version = 10
        (each,) = stopped._sets
        assert await stopped._take_turn(each, 10), "and it is killed before it has answers"
        engine.policy_version = 0  # a new process has the base policy until it has read the newest one
        again = evaluator_of(config, node, engine, asyncio.Lock())
        await again.begin()
        assert not await again._due(each, 0, last=False) and not await again._take_turn(each, 0)
        engine.policy_version = 10
        assert await again._due(each, 10, last=False)
        assert [line["policy_version"] for line in await measured(again, config, 2, version=10)] == [0, 10]


@pytest.mark.slow
async def test_the_policy_of_the_last_step_is_measured_before_anybody_notes_that_training_has_ended(tmp_path: Path) -> None:
    """Else its held-out evaluation, which ends a run with --steps, may come first."""
    config = configured(tmp_path, every_versions=50)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"max_steps": 3})})
    node = await own_plane()
    await ensure_node_streams(node, "alpha")
    async with engine_of(config) as engine:
        evaluator = evaluator_of(config, node, engine, asyncio.Lock())
        await evaluator.begin()
        engine.policy_version, status, states = 3, evaluator._context.status, set[str]()
        evaluator._context.mark_ready()

        async def look() -> None:
            while True:
                states.add(status.snapshot().state)
                await asyncio.sleep(0.001)

        looking = asyncio.create_task(look())
        assert [line["policy_version"] for line in await measured(evaluator, config, 2, version=3)] == [0, 3]
        looking.cancel()
    assert any(state.startswith(EVALUATING_LAST) for state in states), "every view says that it runs"


@pytest.mark.slow
async def test_of_a_set_that_is_added_during_a_run_every_line_says_after_which_step(tmp_path: Path) -> None:
    node = await own_plane()
    await ensure_node_streams(node, "alpha")
    config = configured(tmp_path)

    async def told(config: NodeConfig, lines: int, step: int) -> list[int]:
        position = encode(TrainerPosition(policy_version=step, consumed_local=0))
        await node.kv.put(node_bucket("alpha"), TRAINER_KEY, position)
        started = evaluator_of(config, node, engine, asyncio.Lock())
        await started.begin()
        return [line["added_at"] for line in await measured(started, config, lines)] if config.eval.sets else []

    without = config.model_copy(update={"eval": config.eval.model_copy(update={"sets": []})})
    async with engine_of(config) as engine:
        assert await told(config, 1, 0) == [0]
        assert await told(configured(tmp_path, k=3), 2, 7) == [0, 0], "the same questions, asked in another way"
        assert await told(configured(tmp_path, range(25, 50), k=3), 3, 8) == [0, 0, 8], "other questions"
        assert await told(without, 3, 9) == []
        assert await told(config, 4, 12) == [0, 0, 8, 12], "it was not kept out while it was not configured"
    (curve,) = read_sets(config.node.run_dir).values()
    assert "step 12" in curve.newest.added
    assert any("step 12" in line for line in set_lines(config.node.run_dir))

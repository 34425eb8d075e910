"""An installed engine that returns what it must not is named, and ends the generator before a group
of its samples is published.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import structlog.testing
from prometheus_client import CollectorRegistry

from services.generator.service import GeneratorService
from shared.config import load_config
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_rollouts_stream
from shared.runtime import FatalError, ServiceContext
from shared.runtime.status import StatusBoard
from shared.transport.connect import connect
from tests.installed_packages import forget, install

MODEL = Path(__file__).parents[2] / "models" / "base"
ENGINE = """
from services.generator.engines.base import Engine, Sample

class mine(Engine):
    name = "mine"
    good_calls = {calls}
    def __init__(self, settings): pass
    async def start(self): pass
    async def generate(self, prompts, n, params, *, seed):
        one = dict(token_ids=(1, 2), text="7", finish_reason="stop", logprobs=(-1.0, -1.0))
        return [[Sample(**{{**one, {changed}}})] * n for _ in prompts]
    async def load_policy(self, file, version): pass
    async def score(self, *asked): raise NotImplementedError
    async def close(self): pass
"""


@pytest.fixture(autouse=True)
def _forget_packages() -> Iterator[None]:
    yield
    forget()


async def ended(
    nats_url: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    eval_tasks: int = 0,
    task: dict[str, str] | None = None,
    registry: CollectorRegistry | None = None,
    model: Path = MODEL,
) -> str:
    """The sentence with which the generator ends."""
    install(folder, monkeypatch, "swarm.engines", "mine", code)
    node = f"g{uuid.uuid4().hex[:8]}"
    given = {
        "node": {"id": node, "var_dir": str(folder / "var")},
        "model": {"path": str(model)},
        "tasks": [task or {"dataset": "gcd"}],
        "generator": {"engine": "mine"},
        "eval": {"tasks": eval_tasks},
    }
    config = load_config(None, given)
    transport = await connect(nats_url, name=node)
    await ensure_node_streams(transport, node)
    context = ServiceContext(
        config=config,
        role="generator",
        replica="0",
        node=transport,
        log=structlog.get_logger("test"),
        registry=registry or CollectorRegistry(),
        status=StatusBoard(node, "generator", "0"),
        stopping=asyncio.Event(),
    )
    with pytest.raises(FatalError) as told:
        await asyncio.wait_for(GeneratorService(config).run(context), 30.0)
    assert (await transport.stream_state(node_rollouts_stream(node))).last_seq == 0
    await transport.close()
    return str(told.value)


async def test_samples_that_nobody_could_use_end_the_generator_with_a_sentence_that_names_its_engine(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await ended(nats_url, tmp_path, monkeypatch, ENGINE.format(calls=1, changed="'finish_reason': 'eos'"))
    wanted = "engine mine of the package my-package returned a sample with the unknown finish_reason 'eos'"
    assert told.startswith(wanted) and told.endswith(": correct its generate, or change generator.engine"), told


async def test_the_answers_of_an_evaluation_are_held_to_the_same(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = ENGINE.format(calls=1, changed="'policy_version': -1")
    assert "returned a sample with policy_version -1" in await ended(nats_url, tmp_path, monkeypatch, code, eval_tasks=2)


async def test_rows_that_nobody_can_earn_are_logged_by_line_and_counted(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, registry = tmp_path / "rows.jsonl", CollectorRegistry()
    rows.write_text("".join(f'{{"question": "q{n}", "answer": "{"four" if n == 4 else n}"}}\n' for n in range(9)))
    task = {"source": "file", "path": str(rows), "verifier": "math"}
    code = ENGINE.format(calls=1, changed="'finish_reason': 'eos'")
    with structlog.testing.capture_logs() as logs:
        await ended(nats_url, tmp_path, monkeypatch, code, task=task, registry=registry)
    (told,) = [entry for entry in logs if entry["event"] == "task_rows_left_out"]
    assert told["rows"] == 1 and told["log_level"] == "warning" and "line 5: " in told["first"][1]
    (counted,) = [
        sample.value for metric in registry.collect() for sample in metric.samples if sample.name == "swarm_task_rows_left_out"
    ]
    assert counted == 1.0


@pytest.mark.parametrize("eval_tasks", [0, 4])
async def test_questions_that_the_chat_template_cannot_write_are_left_out_of_draws_and_evaluation_logged_and_counted(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eval_tasks: int
) -> None:
    rows, registry, model = tmp_path / "rows.jsonl", CollectorRegistry(), tmp_path / "model"
    writable = 3 if eval_tasks else 60  # every so many; among a lease's draws one must not be
    rows.write_text("".join(f'{{"question": "q{"odd" if n % writable else ""}{n}", "answer": "{n}"}}\n' for n in range(180)))
    shutil.copytree(MODEL, model)
    template = (model / "chat_template.jinja").read_text()
    fails = "{% if 'odd' in messages[-1].content %}{{ raise_exception('an odd one') }}{% endif %}"
    (model / "chat_template.jinja").write_text(fails + template)
    task = {"source": "file", "path": str(rows), "verifier": "exact"}
    code = ENGINE.format(calls=1, changed="'finish_reason': 'eos'")
    with structlog.testing.capture_logs() as logs:
        await ended(nats_url, tmp_path, monkeypatch, code, task=task, registry=registry, model=model, eval_tasks=eval_tasks)
    told = [entry for entry in logs if entry["event"] == "questions_unwritable"][-1]  # told whenever they have doubled
    assert 1 <= told["questions"] < 180 and told["log_level"] == "warning" and "an odd one" in told["reason"]
    (counted,) = [
        sample.value for metric in registry.collect() for sample in metric.samples if sample.name == "swarm_task_rows_left_out"
    ]
    assert told["questions"] <= counted < 2 * told["questions"]


async def test_an_engine_that_wants_no_calls_is_told_because_nothing_would_ever_be_generated(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await ended(nats_url, tmp_path, monkeypatch, ENGINE.format(calls=0, changed=""))
    assert told.startswith("engine mine of the package my-package has good_calls 0, and must have"), told

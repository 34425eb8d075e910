"""Starting, stopping, refusing: what an engine does when it is not sampling."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

import pytest

from services.generator.engines import EngineError, SamplingParams, UnsupportedByEngine, create_engine
from services.generator.engines.vllm_engine import PolicyGate
from shared.config.generator_section import GeneratorSection
from shared.config.task_sections import JudgeSection
from shared.reward_files import Replies
from shared.rewards import Mark
from shared.tasks.judging import Judge
from tests.engines.conftest import Run, Subject, needs_vllm


@pytest.mark.parametrize("started", [pytest.param("openai-tied", marks=needs_vllm)], indirect=True)
def test_the_openai_engine_refuses_to_load_and_to_score_and_says_what_to_use(subject: Subject, run: Run) -> None:
    with pytest.raises(UnsupportedByEngine, match="use engine vllm or transformers"):
        run(subject.engine.load_policy(subject.base_file, 1))
    with pytest.raises(UnsupportedByEngine, match="use engine vllm or transformers"):
        run(subject.engine.score([[1]], [[2]], SamplingParams()))


@pytest.mark.parametrize("started", [pytest.param("openai-tied", marks=needs_vllm)], indirect=True)
def test_a_model_that_the_server_does_not_serve_is_named_at_start(
    subject: Subject, run: Run, model_folders: dict[bool, Path]
) -> None:
    address = subject.base_url
    engine = create_engine("openai", str(model_folders[True]), base_url=address, served_model="gpt-9")
    with pytest.raises(EngineError, match=r"serves \['tiny'\], not gpt-9"):
        run(engine.start())
    run(engine.close())


def test_an_unreachable_server_is_reported_within_the_deadline(run: Run, model_folders: dict[bool, Path]) -> None:
    engine = create_engine("openai", str(model_folders[True]), base_url="http://127.0.0.1:9/v1", request_timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(EngineError, match="127.0.0.1:9/v1/models: no answer after [2-9] tries in 1 s .*start the server") as told:
        run(engine.start())
    assert time.monotonic() - began < 60
    named = re.findall(r"generator\.(\w+)", str(told.value))
    assert named and set(named) <= set(GeneratorSection.model_fields), "a remedy names settings that exist"
    assert "request timeout" not in str(told.value)
    run(engine.close())


def test_a_transformers_engine_closed_while_sampling_stops_and_answers_no_more(run: Run, model_folders: dict[bool, Path]) -> None:
    engine = create_engine("transformers", str(model_folders[True]), device="cpu")

    async def close_early() -> float:
        await engine.start()
        call = asyncio.create_task(engine.generate([[1]] * 200, 1, SamplingParams(max_new_tokens=500), seed=0))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await engine.close()
        with pytest.raises(EngineError, match="closed while it was sampling"):
            await call
        return time.monotonic() - began

    assert run(close_early()) < 2
    with pytest.raises(EngineError, match="is closed"):
        run(engine.generate([[1]], 1, SamplingParams(), seed=0))


def test_the_event_loop_stays_live_while_transformers_samples(run: Run, model_folders: dict[bool, Path]) -> None:
    engine = create_engine("transformers", str(model_folders[True]), device="cpu")

    async def ticks_while_sampling() -> int:
        await engine.start()
        call = asyncio.create_task(engine.generate([[1]] * 64, 1, SamplingParams(max_new_tokens=64), seed=0))
        ticks = 0
        while not call.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await engine.close()
        return ticks

    assert run(ticks_while_sampling()) > 5


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_an_engine_that_has_not_started_says_so(run: Run, model_folders: dict[bool, Path], kind) -> None:
    engine = create_engine(kind, str(model_folders[True]))
    with pytest.raises(EngineError, match="start()"):
        run(engine.generate([[1]], 1, SamplingParams(), seed=0))
    run(engine.close())


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_a_folder_without_a_model_is_refused_at_start(run: Run, tmp_path: Path, kind) -> None:
    engine = create_engine(kind, str(tmp_path))
    with pytest.raises(EngineError, match=r"without config\.json: give a Hugging Face model folder"):
        run(engine.start())
    run(engine.close())


def test_auto_is_transformers_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a machine's GPU cannot be taken out for a test
    assert create_engine("auto", "model").name == "transformers"


@pytest.mark.vllm
@needs_vllm[1]
def test_on_a_gpu_vllms_processes_are_spawned(monkeypatch: pytest.MonkeyPatch, run: Run, model_folders: dict[bool, Path]) -> None:
    """vLLM forks if CUDA is not initialised, and whether there is a GPU was asked before: in a
    fork, CUDA then refuses to work. A GPU cannot be had for a test: vLLM is told that there is one,
    and is stopped before it starts anything.
    """
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    ways: list[str | None] = []

    def start(_arguments: object) -> None:
        ways.append(os.environ.get("VLLM_WORKER_MULTIPROC_METHOD"))
        raise RuntimeError("stopped by the test")

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _self: False)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with pytest.raises(EngineError, match="stopped by the test"):
        run(create_engine("vllm", str(model_folders[False])).start())
    assert ways == ["spawn"]
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork", "only vLLM's start is affected"


def test_impossible_engines_and_parameters_are_refused_with_the_remedy() -> None:
    with pytest.raises(EngineError, match="set base_url"):
        create_engine("openai", "model")
    with pytest.raises(EngineError, match="no engine is called 'llama': did you mean vllm\\?"):
        create_engine("llama", "model")
    with pytest.raises(EngineError, match="no engine is called 'xyz': there are vllm, transformers, openai"):
        create_engine("xyz", "model")
    for wrong in ({"temperature": 0.001}, {"temperature": float("nan")}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SamplingParams(**wrong)
    with pytest.raises(ValueError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=0)


def test_a_swap_goes_before_later_calls_and_gives_up_at_its_callers_deadline(run: Run) -> None:
    async def story() -> list[str]:
        gate, told = PolicyGate(), []

        async def sample(name: str, seconds: float) -> None:
            async with gate.sampling():
                told.append(f"{name} begins")
                await asyncio.sleep(seconds)
                told.append(f"{name} ends")

        async def swap(deadline_s: float) -> None:
            async with asyncio.timeout(deadline_s), gate.swapping():
                told.append("swap")

        first = asyncio.create_task(sample("first", 0.2))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await swap(0.05)
        waiting = asyncio.create_task(swap(5))
        await asyncio.sleep(0)
        await asyncio.gather(first, waiting, asyncio.create_task(sample("second", 0)))
        return told

    assert run(story()) == ["first begins", "first ends", "swap", "second begins", "second ends"]


@pytest.mark.parametrize("started", [pytest.param("openai-tied", marks=needs_vllm)], indirect=True)
def test_a_real_server_is_asked_as_a_judge_and_counts_its_tokens(subject: Subject, run: Run) -> None:
    """Its context holds 256 tokens, each a byte."""
    assert subject.base_url is not None

    async def asked() -> tuple[list[list[Replies]], int, int, int, str]:
        judge = Judge(JudgeSection(url=str(subject.base_url), model="tiny", reply_tokens=8, timeout_s=60.0))
        try:
            replies = await judge.replies([[["Grade: ", "Grade it: "], int(Mark.TIMEOUT), ["x" * 1000]]])
            return replies, judge.answered, judge.failed, judge.tokens, judge.problem
        finally:
            await judge.close()

    ((said, mark, beyond),), answered, failed, tokens, problem = run(asked())
    assert not isinstance(said, int) and all(said) and mark == Mark.TIMEOUT and beyond == [None]
    assert (answered, failed) == (2, 1) and "status 400" in problem
    assert len("Grade: Grade it: ") < tokens <= len("Grade: Grade it: ") + 2 * 8

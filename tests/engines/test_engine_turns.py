"""Real engines that share their device in turns: they answer the same, load policies, and wait
while another computes. The one with vLLM is in a service of its own, which is then killed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from transformers import Qwen2ForCausalLM

from services.generator.engines import Engine, Sample, SamplingParams, TurnTakingEngine, create_engine
from services.generator.engines.transformers_engine import TransformersEngine
from shared.cancelling import cancel_and_wait
from shared.device_turns import DeviceTurns
from tests import forked
from tests.engines.conftest import needs_vllm
from tests.engines.reference import next_token_logits
from tests.engines.tiny_models import random_policy, write_model_folder, write_policy_file

_PROMPTS = [[65, 66, 67], [70, 71]]
_GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)


async def test_a_call_that_nobody_waits_for_any_more_ends_at_its_next_token(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", random_policy(0, tied=True))
    engine = TransformersEngine(str(folder), device="cpu", threads=1, max_model_len=256)
    await engine.start()
    forwards = asyncio.Event()
    counted: list[None] = []

    def count(*_: object) -> None:
        counted.append(None)
        loop.call_soon_threadsafe(forwards.set)

    loop = asyncio.get_running_loop()
    engine._model.register_forward_hook(count)
    calling = asyncio.create_task(engine.generate([[65, 66]], 8, SamplingParams(max_new_tokens=200), seed=1))
    await asyncio.wait_for(forwards.wait(), 120)
    calling.cancel()
    await engine.rest()
    assert len(counted) < 150
    await cancel_and_wait(calling)
    await engine.close()


@dataclass
class Told:
    """What an engine in turns answered: at first, after it had to wait, and with another policy."""

    base: list[list[Sample]]
    again: list[list[Sample]]
    other: list[list[Sample]]


@dataclass
class Killed:
    """What a service with vLLM told before it was killed, its processes, and which outlived it."""

    told: Told
    children: list[psutil.Process]
    alive: list[psutil.Process]


def policies() -> tuple[Qwen2ForCausalLM, Qwen2ForCausalLM]:
    """The one that an engine starts with, and the one that it loads. Over untied embeddings, which
    no other vLLM engine of `make test` has.
    """
    return random_policy(0, tied=False), random_policy(3, tied=False)


def written(root: Path) -> Path:
    origin, policy = policies()
    write_model_folder(root / "model", origin)
    write_policy_file(root / "policy.safetensors", policy)
    return root


async def story(engine: Engine, root: Path) -> Told:
    """Start, answer, wait for another to compute, answer again, and load a policy."""
    assert isinstance(engine, TurnTakingEngine)

    async def greedy() -> list[list[Sample]]:
        async with engine.turn():
            return await engine.generate(_PROMPTS, 1, _GREEDY, seed=0)

    async with engine.turn():
        await engine.start()
    base = await greedy()
    async with DeviceTurns(root / "device.turns", "trainer").turn():
        waiting = asyncio.create_task(greedy())
        await asyncio.sleep(1.0)
        assert not waiting.done()
    again = await asyncio.wait_for(waiting, 120)
    async with engine.turn():
        await engine.load_policy(root / "policy.safetensors", 1)
    return Told(base, again, await greedy())


def in_turns(kind: str, root: Path) -> Engine:
    turns = DeviceTurns(root / "device.turns", "generator")
    return create_engine(kind, str(root / "model"), max_model_len=256, threads=1, kv_cache_bytes=2**26, turns=turns)


def serve(root: Path) -> None:
    """A service with vLLM, which writes down what it was told and goes on."""
    # A daemon may not have children, but a service may.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]

    async def until_killed() -> None:
        told = await story(in_turns("vllm", root), root)
        (root / "told.new").write_bytes(pickle.dumps(told))
        (root / "told.new").rename(root / "told")
        await asyncio.sleep(600)

    asyncio.run(until_killed())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """One service for two tests, because vLLM takes a quarter of a minute to start."""
    root = written(tmp_path_factory.mktemp("killed"))
    service = forked.start(serve, root)
    try:
        give_up_at = time.monotonic() + 280
        while not (root / "told").exists():
            assert service.is_alive() and time.monotonic() < give_up_at, "the service did not get to its end"
            time.sleep(0.1)
        children = psutil.Process(service.pid).children(recursive=True)
    finally:
        service.kill()
        service.join(10)
    _, alive = psutil.wait_procs(children, timeout=180)
    return Killed(
        pickle.loads((root / "told").read_bytes()), children, [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    )


def check(told: Told) -> None:
    assert [each.token_ids for (each,) in told.again] == [each.token_ids for (each,) in told.base]
    assert [each.token_ids for (each,) in told.other] != [each.token_ids for (each,) in told.base]
    for model, answers in zip(policies(), (told.base, told.other), strict=True):
        for prompt, (sample,) in zip(_PROMPTS, answers, strict=True):
            likeliest = next_token_logits(model, prompt, sample.token_ids).argmax(axis=1)
            assert list(sample.token_ids) == likeliest.tolist()
    assert {each.policy_version for (each,) in told.other} == {1}


async def test_an_engine_in_turns_answers_as_without_and_waits_for_another(tmp_path: Path) -> None:
    engine = in_turns("transformers", written(tmp_path))
    try:
        check(await story(engine, tmp_path))
    finally:
        await engine.close()


@pytest.mark.vllm
@needs_vllm[1]
@pytest.mark.timeout(600)
def test_vllm_in_turns_answers_as_without_and_waits_for_another(killed: Killed) -> None:
    check(killed.told)


@pytest.mark.vllm
@needs_vllm[1]
@pytest.mark.timeout(600)
def test_vllms_process_ends_with_a_service_that_was_killed(killed: Killed) -> None:
    assert killed.children, "vLLM has a process of its own"
    assert not killed.alive

"""Real engines that share their device in turns: they answer the same, load policies, and wait
while another computes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.generator.engines import Sample, SamplingParams, create_engine
from services.generator.engines.transformers_engine import TransformersEngine
from services.generator.engines.turns import TurnTakingEngine
from shared.cancelling import cancel_and_wait
from shared.device_turns import DeviceTurns
from tests.engines.conftest import needs_vllm
from tests.engines.reference import next_token_logits
from tests.engines.tiny_models import random_policy, write_model_folder, write_policy_file

_KINDS = ["transformers", pytest.param("vllm", marks=needs_vllm)]
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


@pytest.mark.deadline(300)
@pytest.mark.parametrize("kind", _KINDS)
async def test_an_engine_in_turns_answers_as_without_and_waits_for_another(kind: str, tmp_path: Path) -> None:
    """Over untied embeddings, which no other vLLM engine of `make test` has."""
    origin, policy = random_policy(0, tied=False), random_policy(3, tied=False)
    folder = write_model_folder(tmp_path / "model", origin)
    file = write_policy_file(tmp_path / "policy.safetensors", policy)
    turns = tmp_path / "device.turns"
    engine = create_engine(kind, str(folder), max_model_len=256, turns=DeviceTurns(turns, "generator"))
    assert isinstance(engine, TurnTakingEngine)

    async def greedy() -> list[list[Sample]]:
        async with engine.turn():
            return await engine.generate(_PROMPTS, 1, _GREEDY, seed=0)

    try:
        async with engine.turn():
            await engine.start()
        base = await greedy()
        async with DeviceTurns(turns, "trainer").turn():
            waiting = asyncio.create_task(greedy())
            await asyncio.sleep(1.0)
            assert not waiting.done()
        again = await asyncio.wait_for(waiting, 120)
        async with engine.turn():
            await engine.load_policy(file, 1)
        other = await greedy()
    finally:
        await engine.close()

    assert [each.token_ids for (each,) in again] == [each.token_ids for (each,) in base]
    assert [each.token_ids for (each,) in other] != [each.token_ids for (each,) in base]
    for model, answers in ((origin, base), (policy, other)):
        for prompt, (sample,) in zip(_PROMPTS, answers, strict=True):
            likeliest = next_token_logits(model, prompt, sample.token_ids).argmax(axis=1)
            assert list(sample.token_ids) == likeliest.tolist()
    assert {each.policy_version for (each,) in other} == {1}

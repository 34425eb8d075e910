"""The openai engine over servers that are not vLLM: text alone, one completion a request, chat
alone, a key.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.generator.engines import EngineError, Sample, SamplingParams, create_engine
from services.generator.groups import rollout_group
from services.generator.tasks import PromptedTask, Prompter
from services.trainer.selection.group_tokens import SkippedGroup, local_tokens
from shared.config import load_config
from shared.contracts.messages import TaskRef
from shared.contracts.wire import ModelIdentity
from shared.model.reading import load_tokenizer
from shared.tasks import HeldOut
from shared.tasks.prompt import text_task
from tests.engines.openai_server import OPENAIS_OWN, Behaviour, openai_server

KEY = "sk-not-for-logs"


def sampled(
    folder: Path, behaviour: Behaviour, *, n: int = 3, params: SamplingParams | None = None, **settings: str
) -> tuple[list[list[Sample]], object]:
    """The completions of two prompts, and the engine's tokenizer."""

    async def run(url: str) -> tuple[list[list[Sample]], object]:
        engine = create_engine("openai", str(folder), base_url=url, max_model_len=64, request_timeout_s=20.0, **settings)
        try:
            await engine.start()
            behaviour.asked.clear()
            prompts = [[5, 6, 7], [8, 9]]
            return await engine.generate(prompts, n, params or SamplingParams(max_new_tokens=8), seed=3), engine._folder.tokenizer
        finally:
            await engine.close()

    with openai_server(behaviour) as url:
        return asyncio.run(run(url))


def test_a_server_of_text_alone_is_asked_in_its_words_and_its_text_is_counted(model_folders: dict[bool, Path]) -> None:
    behaviour = Behaviour()
    answers, tokenizer = sampled(model_folders[True], behaviour)
    assert [len(samples) for samples in answers] == [3, 3]
    assert all(set(body) <= OPENAIS_OWN and body["n"] == 3 for body in behaviour.asked)
    prompts = [tokenizer.decode(ids) for ids in ([5, 6, 7], [8, 9])]  # type: ignore[attr-defined]
    assert sorted(body["prompt"] for body in behaviour.asked) == sorted(prompts)  # asked at once, so in either order
    for sample in (each for samples in answers for each in samples):
        assert sample.logprobs is None
        ended = sample.finish_reason == "stop"
        assert len(sample.token_ids) == len(tokenizer.encode(sample.text)) + ended  # type: ignore[attr-defined]


def test_top_k_is_asked_for_although_it_is_not_openais_own(model_folders: dict[bool, Path]) -> None:
    behaviour = Behaviour(strict=False)
    sampled(model_folders[True], behaviour, params=SamplingParams(max_new_tokens=8, top_k=5))
    assert all(body["top_k"] == 5 for body in behaviour.asked)


def test_a_server_that_gives_one_completion_is_asked_once_for_each_under_other_seeds(model_folders: dict[bool, Path]) -> None:
    behaviour = Behaviour(many=False)
    answers, _ = sampled(model_folders[True], behaviour)
    assert [len(samples) for samples in answers] == [3, 3]
    assert len({body["seed"] for body in behaviour.asked}) == 6 == len(behaviour.asked)


def test_groups_of_text_alone_hold_no_tokens_and_train_nobody_here(model_folders: dict[bool, Path]) -> None:
    answers, _ = sampled(model_folders[True], Behaviour())
    task = text_task(TaskRef(dataset="gcd", seed=1, index=0), "gcd?", "3")
    group = rollout_group(
        PromptedTask(task, [5, 6, 7]),
        answers[0],
        node="alpha",
        draw=0,
        model=ModelIdentity(name="tiny", tokenizer_hash="0" * 64),
        params=SamplingParams(),
        created_at=1.0,
    )
    assert all(each.token_ids is None and each.behaviour_logprobs is None for each in group.completions)
    assert all(each.token_count > 0 for each in group.completions)
    with pytest.raises(SkippedGroup, match="text_alone"):
        local_tokens(group, None)  # type: ignore[arg-type]  # the rules are not needed to refuse it


@pytest.mark.parametrize(
    ("behaviour", "settings", "words"),
    [
        (Behaviour(completions=False), {}, "status 404.*a completions or a chat interface is needed"),
        (Behaviour(key="another"), {"api_key": KEY}, "status 401.*<the key>"),
        (Behaviour(models=("a", "b")), {}, "serves .'a', 'b'., not None: set generator.openai_model"),
        (Behaviour(models=("a",)), {"served_model": "c"}, "serves .'a'., not c: set generator.openai_model"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_at_the_start_in_a_sentence_without_the_key(
    model_folders: dict[bool, Path], behaviour: Behaviour, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(EngineError, match=words) as refused:
        sampled(model_folders[True], behaviour, **settings)
    assert KEY not in str(refused.value)


def test_the_key_is_sent_and_the_model_asked_for_by_its_name(model_folders: dict[bool, Path]) -> None:
    behaviour = Behaviour(key=KEY, models=("a", "b"))
    sampled(model_folders[True], behaviour, api_key=KEY, served_model="b")
    assert all(body["model"] == "b" for body in behaviour.asked)


def test_a_teacher_with_a_chat_interface_alone_is_asked_with_messages_and_gives_text(model_folders: dict[bool, Path]) -> None:
    """Its own template writes the conversation, so that no token of ours reaches it."""
    model = {"path": str(model_folders[True]), "system_prompt": "Be brief."}
    config = load_config(overrides={"tasks": [{"dataset": "gcd"}], "model": model, "generator": {"max_new_tokens": 8}})
    task = text_task(TaskRef(dataset="gcd", seed=1, index=0), "gcd(4, 6)?", "2")
    prompt = Prompter(config, load_tokenizer(config.model), 64, HeldOut([])).prompted(task).prompt_ids
    behaviour = Behaviour(completions=False, chat=lambda body: "It is 2." if body["max_tokens"] > 1 else "It")

    async def run(url: str) -> list[list[Sample]]:
        engine = create_engine("openai", str(model_folders[True]), base_url=url, max_model_len=64, request_timeout_s=20.0)
        try:
            await engine.start()
            behaviour.asked.clear()
            answers = await engine.generate([prompt, prompt], 3, SamplingParams(max_new_tokens=8), seed=3)
            with pytest.raises(EngineError, match="takes messages"):
                await engine.generate([[5, 6]], 3, SamplingParams(max_new_tokens=8), seed=3)
            return answers
        finally:
            await engine.close()

    with openai_server(behaviour) as url:
        answers = asyncio.run(run(url))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "gcd(4, 6)?"}]
    assert [body["messages"] for body in behaviour.asked] == [messages] * 2 and all(body["n"] == 3 for body in behaviour.asked)
    assert all("prompt" not in body and body["max_tokens"] == 8 for body in behaviour.asked)
    assert [[sample.text for sample in samples] for samples in answers] == [["It is 2."] * 3] * 2
    assert all(sample.logprobs is None and sample.finish_reason == "stop" for samples in answers for sample in samples)

"""The openai engine over servers that refuse some prompts, or answer what no server should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.generator.engines import EngineError, Sample, SamplingParams, create_engine
from services.generator.engines.base import WrongSetting
from shared.runtime.exits import EXIT_CONFIG
from tests.engines.openai_server import Behaviour, openai_server
from tests.engines.served_node import served_node

ASKED = 8


def choice(**other: Any) -> dict[str, Any]:
    return {"index": 0, "text": "7", "finish_reason": "stop"} | other


def content(*choices: Any) -> Callable[[dict[str, Any]], Any]:
    """Return what a server answers with these choices, each once for every completion asked for."""
    return lambda body: (200, {"choices": [each for each in choices for _ in range(body["n"])]})


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in choice().items() if key != name}


LIES = {
    "choices are a number": lambda _: (200, {"choices": 5}),
    "choices are words": content("x"),
    "no index": content(without("index")),
    "no text": content(without("text")),
    "half a surrogate pair": content(choice(text="\ud800")),
    "a list": lambda _: (200, [1]),
    "nested": lambda _: (200, b"[" * 50_000),
}
TOO_FEW = {"a completion too few": lambda body: (200, {"choices": [choice()] * (body["n"] - 1)})}
TOO_MUCH = {
    "a body without end": content(choice(text="7" * 10_000_000)),
    "a long text": content(choice(text="7 " * 16_000)),
    "a text of too many tokens": content(choice(text="7 " * 100)),
    "too many tokens": content(choice(token_ids=[7] * (ASKED + 1), logprobs={"token_logprobs": [-1.0] * (ASKED + 1)})),
}


def answered(
    folder: Path, instead: Callable[[dict[str, Any]], Any], *, at_start: bool = False, ids: bool = False
) -> tuple[list[list[Sample]], str]:
    """The completions of two prompts by a server that answers `instead` to prompts, and its
    address; `ids`: it gives token ids with their logprobs.
    """
    first = content(choice(token_ids=[7], logprobs={"token_logprobs": [-1.0]})) if ids else lambda _: None

    async def run(url: str) -> tuple[list[list[Sample]], str]:
        engine = create_engine("openai", str(folder), base_url=url, max_model_len=64, request_timeout_s=20.0)
        try:
            await engine.start()
            return await engine.generate([[5, 6, 7], [8, 9]], 2, SamplingParams(max_new_tokens=ASKED), seed=3), url
        finally:
            await engine.close()

    behaviour = Behaviour(
        ids=ids, strict=not ids, instead=lambda body: (instead if at_start or body["max_tokens"] > 1 else first)(body)
    )
    with openai_server(behaviour) as url:
        return asyncio.run(run(url))


@pytest.mark.parametrize("lie", LIES | TOO_FEW)
def test_an_answer_that_cannot_be_read_gives_no_completions_and_is_told_with_the_address(
    model_folders: dict[bool, Path], lie: str
) -> None:
    with capture_logs() as logs:
        groups, url = answered(model_folders[True], (LIES | TOO_FEW)[lie])
    assert groups == [[], []]
    (told,) = [line for line in logs if line["event"] == "prompts_without_answer"]
    assert told["prompts"] == 2 and url in told["reason"]


@pytest.mark.parametrize("much", TOO_MUCH)
def test_more_than_was_asked_for_is_not_taken(model_folders: dict[bool, Path], much: str) -> None:
    with capture_logs() as logs:
        groups, url = answered(model_folders[True], TOO_MUCH[much], ids=much == "too many tokens")
    assert groups == [[], []]
    (told,) = [line for line in logs if line["event"] == "prompts_without_answer"]
    assert url in told["reason"] and ("asked for" in told["reason"] or "larger than" in told["reason"])


@pytest.mark.parametrize("lie", LIES)
def test_a_server_whose_first_answer_cannot_be_read_is_refused_in_a_sentence(model_folders: dict[bool, Path], lie: str) -> None:
    with pytest.raises(EngineError, match=r"http://127.0.0.1:\d+/v1/completions.*OpenAI"):
        answered(model_folders[True], LIES[lie], at_start=True)


@pytest.mark.parametrize(
    "refusal", [(400, {"error": "content policy"}), (200, {"choices": [choice(finish_reason="content_filter")] * 2})]
)
def test_one_refused_or_filtered_prompt_costs_no_other_prompt(model_folders: dict[bool, Path], refusal: tuple[int, Any]) -> None:
    refused: list[str] = []  # the first prompt that arrives

    def instead(body: dict[str, Any]) -> Any:
        refused.append(body["prompt"])
        return refusal if body["prompt"] == refused[0] else None

    groups, _ = answered(model_folders[True], instead)
    assert sorted(map(len, groups)) == [0, 2]


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_later_is_a_wrong_setting(model_folders: dict[bool, Path], status: int) -> None:
    with pytest.raises(WrongSetting, match=f"status {status}.*key"):
        answered(model_folders[True], lambda _: (status, {"error": "x"}))


@pytest.mark.slow
async def test_a_generator_leaves_refused_prompts_out_and_asks_ever_less_while_all_are_refused(
    nats_url: str, model_folders: dict[bool, Path], tmp_path: Path
) -> None:
    refuse = True
    behaviour = Behaviour(instead=lambda body: (400, {"error": "no"}) if refuse and body["max_tokens"] > 1 else None)
    with openai_server(behaviour) as url:
        async with served_node(nats_url, model_folders[True], url, tmp_path, SWARM_EVAL__TASKS="2") as node:

            async def told_twice() -> bool:
                return len(node.told("nothing_usable")) >= 2 and (await node.state()).startswith("waiting")

            async def goes_on() -> bool:
                return await node.groups() > 0 and await node.state() == "generating"

            await node.until(told_twice)
            pauses = [line["consequence"] for line in node.told("nothing_usable")[:2]]
            assert pauses == ["asking again in 1 s", "asking again in 2 s"]
            assert node.told("evaluation_left_out") and not node.told("crashed")
            refuse = False
            await node.until(goes_on)


@pytest.mark.slow
async def test_a_generator_whose_key_is_refused_ends_with_78_and_a_sentence(
    nats_url: str, model_folders: dict[bool, Path], tmp_path: Path
) -> None:
    behaviour = Behaviour(instead=lambda body: (401, {"error": "expired"}) if body["max_tokens"] > 1 else None)
    with openai_server(behaviour) as url:
        async with served_node(nats_url, model_folders[True], url, tmp_path) as node:
            assert await asyncio.to_thread(node.process.wait, 120) == EXIT_CONFIG
            (told,) = node.told("cannot_go_on")
            assert "401" in told["reason"] and not node.told("crashed")

"""What an engine returns is checked before groups are made of it, and the engine at fault is
named.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.generator.engine_calls import calls_of, sampled
from services.generator.engines.base import EngineError, Sample, SamplingParams
from shared.runtime import FatalError

GOOD = Sample((1, 2), "7", "stop", (-1.0, 0.0))


def with_(**changed: Any) -> list[list[Sample]]:
    """The samples of two prompts, of which the last is changed."""
    return [[GOOD] * 3, [GOOD, GOOD, replace(GOOD, **changed)]]


async def returned(found: Any, name: str = "mine", *, loads_policies: bool = True) -> list[list[Sample]]:
    """Return what passes of an engine that returns `found`; nothing else is asked of it here."""

    async def generate(*asked: Any, **settings: Any) -> Any:
        return found

    engine: Any = SimpleNamespace(name=name, generate=generate, loads_policies=loads_policies)
    return await sampled(engine, [[1], [2]], 3, SamplingParams(), seed=0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "a NoneType that is no list of lists of samples"),
        ([GOOD, GOOD], "a list that is no list of lists of samples"),
        ([[GOOD] * 3], "samples of 1 prompts where 2 were given"),
        ([[GOOD] * 3, []], "0 samples of a prompt where 3 were asked for"),
        ([[GOOD] * 3, [GOOD] * 2], "2 samples of a prompt where 3 were asked for"),
        ([[{}] * 3] * 2, "a dict instead of a Sample"),
        (with_(finish_reason="eos"), r"a sample with the unknown finish_reason 'eos' \(there are stop, length\)"),
        (with_(policy_version=-1), "a sample with policy_version -1, which must be a whole number of 0 or more"),
        (with_(policy_version="1"), "a sample with policy_version '1', which must be"),
        (with_(text=None), "a sample whose text cannot be used"),
        (with_(text="\ud800"), "a sample whose text cannot be used .*surrogates"),
        (with_(token_ids=(-1, 2)), "a sample whose token_ids cannot be used .*negative"),
        (with_(token_ids=(2**40, 2)), "a sample whose token_ids cannot be used"),
        (with_(token_ids=None), "a sample whose token_ids cannot be used"),
        (with_(logprobs=(-1.0,)), "a sample with 1 logprobs for 2 token_ids"),
        (with_(logprobs=(math.nan, 0.0)), "a sample whose logprobs cannot be used .*NaN"),
        (with_(logprobs=(-math.inf, 0.0)), "a sample whose logprobs cannot be used .*infinite"),
    ],
)
async def test_samples_that_nobody_could_use_are_told_with_the_name_of_their_engine(found: Any, words: str) -> None:
    with pytest.raises(FatalError, match=f"engine mine returned {words}.*: correct its generate, or change generator.engine"):
        await returned(found)


async def test_samples_of_a_built_in_engine_which_a_server_may_have_made_end_no_generator_for_good() -> None:
    with pytest.raises(EngineError, match="engine openai returned a sample with 1 logprobs for 2 token_ids"):
        await returned(with_(logprobs=(-1.0,)), "openai")


async def test_samples_that_can_be_used_pass_as_they_are() -> None:
    text_only, whole = replace(GOOD, logprobs=None), with_(token_ids=(), logprobs=(), finish_reason="length")
    assert await returned(with_(logprobs=None)) == [[GOOD] * 3, [GOOD, GOOD, text_only]]
    assert await returned(tuple(map(tuple, whole))) == whole
    assert await returned([[GOOD] * 3, []], loads_policies=False) == [[GOOD] * 3, []], "of a prompt that a server refuses"


def test_an_engine_that_wants_no_calls_is_told_with_both_remedies() -> None:
    for calls in (0, -1, 1.5, None):
        engine: Any = SimpleNamespace(name="mine", good_calls=calls)
        with pytest.raises(FatalError, match=r"engine mine has good_calls .*: correct it"):
            calls_of(engine)

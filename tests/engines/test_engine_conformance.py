"""What every engine promises (`services.generator.engines.base`), tried on all of them for real."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.generator.engines import EngineError, Sample, SamplingParams
from tests.engines.conftest import ALL, CONTEXT_LENGTH, TRAINABLE, Run, Subject
from tests.engines.reference import chi_square_z, next_token_logits, process, reference_logprobs
from tests.engines.tiny_models import END_TOKEN_ID, byte_tokenizer, write_policy_file

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [200], [40, 41, 42], list(range(60, 130))]
"""Of different lengths, so that whatever pads has to pad."""
PARAMS = [
    SamplingParams(max_new_tokens=12),
    SamplingParams(temperature=0.6, max_new_tokens=12),
    SamplingParams(temperature=1.5, top_k=20, max_new_tokens=12),
    SamplingParams(top_p=0.8, max_new_tokens=12),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=50, max_new_tokens=12),
    SamplingParams(temperature=0.0, top_p=0.5, top_k=3, max_new_tokens=12),
]

all_engines = pytest.mark.parametrize("started", ALL, indirect=True)
trainable_engines = pytest.mark.parametrize("started", TRAINABLE, indirect=True)


def flat(groups: list[list[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def greedy_answers(subject: Subject, run: Run) -> list[list[Sample]]:
    answers: list[list[Sample]] = run(subject.engine.generate(PROMPTS, 1, SamplingParams(temperature=0, max_new_tokens=10), seed=0))
    return answers


@all_engines
def test_every_prompt_gets_n_samples_with_as_many_logprobs_as_tokens(subject: Subject, run: Run) -> None:
    params, engine = SamplingParams(max_new_tokens=7), subject.engine
    ended, tokens = engine.completions_ended, engine.tokens_sampled
    groups = run(engine.generate(PROMPTS, 3, params, seed=1))
    assert [len(group) for group in groups] == [3] * len(PROMPTS)
    counted = (engine.completions_ended - ended, engine.tokens_sampled - tokens)
    assert counted == (len(flat(groups)), sum(len(sample.token_ids) for sample in flat(groups))), "people see how far it is"
    for sample in flat(groups):
        assert 1 <= len(sample.token_ids) <= 7
        assert len(sample.logprobs) == len(sample.token_ids)
        assert all(logprob <= 0 for logprob in sample.logprobs)
        assert sample.text == byte_tokenizer().decode(sample.token_ids, skip_special_tokens=True)
        assert sample.policy_version == 0


@all_engines
def test_a_completion_that_stops_keeps_its_end_token_and_the_others_run_to_the_limit(subject: Subject, run: Run) -> None:
    samples = flat(run(subject.engine.generate(PROMPTS, 24, SamplingParams(max_new_tokens=80), seed=2)))
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        assert END_TOKEN_ID not in sample.token_ids[:-1]
        assert (sample.token_ids[-1] == END_TOKEN_ID) == (sample.finish_reason == "stop")
        assert sample.finish_reason == "stop" or len(sample.token_ids) == 80
        assert "<|end|>" not in sample.text


@all_engines
@pytest.mark.parametrize("params", PARAMS, ids=lambda params: f"t{params.temperature}-p{params.top_p}-k{params.top_k}")
def test_logprobs_are_those_of_the_distribution_that_was_sampled(subject: Subject, run: Run, params: SamplingParams) -> None:
    groups = run(subject.engine.generate(PROMPTS, 2, params, seed=3))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for sample in group:
            expected = reference_logprobs(subject.base, prompt, sample.token_ids, params)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


@all_engines
def test_first_tokens_are_distributed_as_the_softmax_says(subject: Subject, run: Run) -> None:
    prompt, params = PROMPTS[0], SamplingParams(max_new_tokens=1)
    samples = flat(run(subject.engine.generate([prompt], 3000, params, seed=4)))
    logits = next_token_logits(subject.base, prompt, [0])[0]
    counts = np.bincount([sample.token_ids[0] for sample in samples], minlength=len(logits))
    assert chi_square_z(counts, np.exp(process(logits, params))) < 4
    assert chi_square_z(counts, np.exp(process(logits, SamplingParams(temperature=0.8)))) > 8, "the test has no power"


@all_engines
def test_samples_of_one_prompt_differ_and_so_do_equal_prompts(subject: Subject, run: Run) -> None:
    groups = run(subject.engine.generate([PROMPTS[0]] * 3, 8, SamplingParams(max_new_tokens=12), seed=5))
    assert len({sample.token_ids for sample in flat(groups)}) == 24


@all_engines
def test_the_seed_decides_the_samples(subject: Subject, run: Run) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=12)
    first = run(subject.engine.generate(PROMPTS, 4, params, seed=6))
    again = run(subject.engine.generate(PROMPTS, 4, params, seed=6))
    other = run(subject.engine.generate(PROMPTS, 4, params, seed=7))
    assert [sample.token_ids for sample in flat(first)] == [sample.token_ids for sample in flat(again)]
    assert [sample.token_ids for sample in flat(first)] != [sample.token_ids for sample in flat(other)]


@all_engines
def test_greedy_takes_the_likeliest_token_every_time(subject: Subject, run: Run) -> None:
    for prompt, [sample] in zip(PROMPTS, greedy_answers(subject, run), strict=True):
        logits = next_token_logits(subject.base, prompt, sample.token_ids)
        assert list(sample.token_ids) == logits.argmax(axis=1).tolist()


@all_engines
def test_a_completion_ends_where_the_context_does(subject: Subject, run: Run) -> None:
    long, short = [7] * (CONTEXT_LENGTH - 5), [7, 8]
    [[cut], [whole]] = run(subject.engine.generate([long, short], 1, SamplingParams(max_new_tokens=20), seed=11))
    assert (len(cut.token_ids), cut.finish_reason) == (5, "length")
    assert len(whole.token_ids) == 20 or whole.finish_reason == "stop"
    with pytest.raises(EngineError, match=f"prompt 1 has {CONTEXT_LENGTH} tokens.*max_model_len"):
        run(subject.engine.generate([short, [7] * CONTEXT_LENGTH], 1, SamplingParams(), seed=0))


@all_engines
def test_many_long_prompts_at_once_are_all_answered(subject: Subject, run: Run) -> None:
    prompts = [[number + 1] * 200 for number in range(60)]
    groups = run(subject.engine.generate(prompts, 2, SamplingParams(max_new_tokens=4), seed=12))
    for prompt, group in list(zip(prompts, groups, strict=True))[::20]:
        for sample in group:
            expected = reference_logprobs(subject.base, prompt, sample.token_ids, SamplingParams())
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


@all_engines
def test_concurrent_calls_are_all_answered(subject: Subject, run: Run) -> None:
    params = SamplingParams(max_new_tokens=8)

    async def many() -> list[list[list[Sample]]]:
        return await asyncio.gather(*(subject.engine.generate([prompt], 2, params, seed=9) for prompt in PROMPTS * 3))

    answers = run(many())
    for prompt, groups in zip(PROMPTS * 3, answers, strict=True):
        for sample in flat(groups):
            expected = reference_logprobs(subject.base, prompt, sample.token_ids, params)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


@trainable_engines
@pytest.mark.parametrize("params", PARAMS, ids=lambda params: f"t{params.temperature}-p{params.top_p}-k{params.top_k}")
def test_given_tokens_are_scored_as_the_model_scores_them(subject: Subject, run: Run, params: SamplingParams) -> None:
    completions = [[3, 4, 5], [250, END_TOKEN_ID], [90], [1, 2, 3, 4]]
    scores = run(subject.engine.score(PROMPTS, completions, params))
    for prompt, completion, score in zip(PROMPTS, completions, scores, strict=True):
        np.testing.assert_allclose(score, reference_logprobs(subject.base, prompt, completion, params), atol=1e-4)


@trainable_engines
def test_after_every_load_samples_and_scores_are_the_new_policys(subject: Subject, run: Run, tmp_path) -> None:
    params = SamplingParams(max_new_tokens=12)
    answers = [greedy_answers(subject, run)]
    for version in (1, 2, 3):
        policy = subject.other_policy(seed=version)
        run(subject.engine.load_policy(write_policy_file(tmp_path / f"{version}.safetensors", policy), version))
        assert subject.engine.policy_version == version
        for prompt, group in zip(PROMPTS, run(subject.engine.generate(PROMPTS, 2, params, seed=8)), strict=True):
            for sample in group:
                assert sample.policy_version == version
                expected = reference_logprobs(policy, prompt, sample.token_ids, params)
                np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
        scores = run(subject.engine.score(PROMPTS, [[1, 2, 3]] * len(PROMPTS), params))
        for prompt, score in zip(PROMPTS, scores, strict=True):
            np.testing.assert_allclose(score, reference_logprobs(policy, prompt, [1, 2, 3], params), atol=1e-4)
        answers.append(greedy_answers(subject, run))
    assert len({tuple(sample.token_ids for sample in flat(answer)) for answer in answers}) == 4


@trainable_engines
def test_a_call_that_runs_while_a_policy_is_loaded_ends_under_the_version_it_began_with(
    subject: Subject, run: Run, tmp_path
) -> None:
    new = subject.other_policy(seed=4)
    new_file = write_policy_file(tmp_path / "4.safetensors", new)
    params = SamplingParams(max_new_tokens=60)

    async def swap_under_way() -> list[list[list[Sample]]]:
        before = asyncio.create_task(subject.engine.generate(PROMPTS, 2, params, seed=10))
        await asyncio.sleep(0.05)
        swap = asyncio.create_task(subject.engine.load_policy(new_file, 4))
        await asyncio.sleep(0.01)
        during = asyncio.create_task(subject.engine.generate(PROMPTS, 2, params, seed=10))
        await swap
        after = asyncio.create_task(subject.engine.generate(PROMPTS, 2, params, seed=10))
        return [await before, await during, await after]

    before, during, after = run(swap_under_way())
    # Whether the second call begins before the new policy is in force is the machine's business.
    (begun,) = {sample.policy_version for sample in flat(during)}
    policies = {0: subject.base, 4: new}
    for groups, policy, version in ((before, subject.base, 0), (during, policies[begun], begun), (after, new, 4)):
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for sample in group:
                assert sample.policy_version == version
                expected = reference_logprobs(policy, prompt, sample.token_ids, params)
                np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)

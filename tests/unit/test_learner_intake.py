"""What becomes of a batch's groups before training: kept tokens, encoded text, or left out and
counted.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.trainer.objectives.advantages import group_normalised
from services.trainer.selection.intake import IntakeRules, take_in
from shared.config.model_section import ModelSection
from shared.contracts.codec import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from shared.model.prompts import render_prompt, tokenizer_hash
from shared.model.reading import load_tokenizer
from tests.integration.trainer_life import batch_of, scored_group, tiny_policy


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> IntakeRules:
    model = tiny_policy(tmp_path_factory.mktemp("model") / "tiny")
    tokenizer = load_tokenizer(ModelSection(path=str(model)))
    return IntakeRules(
        tokenizer=tokenizer, tokenizer_hash=tokenizer_hash(tokenizer), end_token_id=256, vocabulary_size=300, max_length=64
    )


def test_groups_of_the_same_tokenizer_keep_the_sampled_tokens_and_their_logprobs(rules: IntakeRules) -> None:
    scored = scored_group(rules.tokenizer, random.Random(0))
    intake = take_in(batch_of(1, [scored]), rules)
    (group,) = intake.groups
    completions = scored.group.completions
    assert [list(ids) for ids in group.completions] == [unpack_ids(c.token_ids or b"") for c in completions]
    sampled = [unpack_logprobs(completion.behaviour_logprobs or b"") for completion in completions]
    assert [list(logprobs or []) for logprobs in group.behaviour_logprobs] == sampled
    assert list(group.prompt_ids) == unpack_ids(scored.group.prompt_ids or b"")
    assert all(ids[-1] == 256 for ids in group.completions)
    assert (intake.with_behaviour, intake.reencoded) == (1, 0)


def test_groups_of_another_tokenizer_are_encoded_again_with_their_end_token(rules: IntakeRules) -> None:
    scored = scored_group(rules.tokenizer, random.Random(0), same_tokenizer=False, origin="external", finish_reason="length")
    intake = take_in(batch_of(1, [scored]), rules)
    (group,) = intake.groups
    texts = [completion.text for completion in scored.group.completions]
    expected = [rules.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [list(ids) for ids in group.completions] == [expected[0], *([*ids, 256] for ids in expected[1:])]
    assert group.behaviour_logprobs == [None] * len(texts)
    assert list(group.prompt_ids) == render_prompt(rules.tokenizer, scored.group.task.prompt)
    assert not group.is_local and (intake.with_behaviour, intake.reencoded) == (0, 1)


def test_a_local_group_of_text_alone_is_not_trained_on(rules: IntakeRules) -> None:
    scored = scored_group(rules.tokenizer, random.Random(0), token_ids=None, behaviour_logprobs=None)
    intake = take_in(batch_of(1, [scored]), rules)
    assert not intake.groups and intake.skipped == {"text_alone": 1}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("malformed_tokens", {"token_count": 99}),
    ("malformed_tokens", {"token_ids": b"\x01\x02\x03", "token_count": 1}),
    ("malformed_tokens", {"token_ids": pack_ids([-1]), "token_count": 1, "behaviour_logprobs": pack_logprobs([-1.0])}),
    ("malformed_tokens", {"behaviour_logprobs": pack_logprobs([-1.0] * 99)}),
    ("malformed_tokens", {"behaviour_logprobs": pack_logprobs([float("nan")]), "token_ids": pack_ids([5]), "token_count": 1}),
    ("unknown_token", {"token_ids": pack_ids([300]), "token_count": 1, "behaviour_logprobs": pack_logprobs([-1.0])}),
    ("too_long", {"token_ids": pack_ids([5] * 60), "token_count": 60, "behaviour_logprobs": pack_logprobs([-1.0] * 60)}),
]


@pytest.mark.parametrize(("reason", "changes"), BAD, ids=[f"{reason}-{index}" for index, (reason, _) in enumerate(BAD)])
def test_a_bad_group_is_left_out_and_counted_and_the_others_are_trained(
    rules: IntakeRules, reason: str, changes: dict[str, Any]
) -> None:
    good, bad = scored_group(rules.tokenizer, random.Random(0)), scored_group(rules.tokenizer, random.Random(1), **changes)
    intake = take_in(batch_of(1, [bad, good]), rules)
    assert len(intake.groups) == intake.local == 1
    assert dict(intake.skipped) == {reason: 1}


def test_a_group_without_one_reward_per_completion_is_left_out(rules: IntakeRules) -> None:
    scored = scored_group(rules.tokenizer, random.Random(0))
    short = msgspec.structs.replace(scored, rewards=scored.rewards[1:])
    failed = msgspec.structs.replace(scored, rewards=[], failure="timed out")
    assert dict(take_in(batch_of(1, [short, failed]), rules).skipped) == {"unscored": 2}


def test_an_answer_without_tokens_counts_in_the_baseline_and_is_not_trained(rules: IntakeRules) -> None:
    scored = scored_group(
        rules.tokenizer, random.Random(0), rewards=(1.0, 0.0, 0.0), token_ids=b"", token_count=0, behaviour_logprobs=b""
    )
    (group,) = take_in(batch_of(1, [scored]), rules).groups
    assert len(group.completions) == 2
    assert group.advantages == pytest.approx([-1 / 3 / (1 / 3**0.5 + 1e-4)] * 2, rel=1e-6)


def test_groups_without_spread_are_counted_and_rewards_are_kept_apart_by_whose_they_are(rules: IntakeRules) -> None:
    own = scored_group(rules.tokenizer, random.Random(0), rewards=(1.0, 1.0))
    foreign = scored_group(rules.tokenizer, random.Random(1), rewards=(0.0, 0.5), origin="external")
    intake = take_in(batch_of(1, [own, foreign]), replace(rules, external_weight=0.25))
    assert intake.zero_advantage == 1 and list(intake.groups[0].advantages) == [0.0, 0.0]
    assert (intake.rewards_local, intake.rewards_external) == ([1.0, 1.0], [0.0, 0.5])
    assert [group.weight for group in intake.groups] == [1.0, 0.25]


def test_a_batch_of_which_nothing_can_be_used_gives_no_groups(rules: IntakeRules, tmp_path: Path) -> None:
    bad = scored_group(rules.tokenizer, random.Random(0), token_count=99)
    intake = take_in(batch_of(1, [bad]), rules)
    assert intake.groups == [] and intake.rewards_local == [] and intake.skipped.total() == 1


def test_a_foreign_answer_without_tokens_is_no_part_of_the_others_baseline(rules: IntakeRules) -> None:
    nothing = {"text": "", "finish_reason": "length", "token_ids": b"", "token_count": 0, "behaviour_logprobs": b""}
    scored = scored_group(rules.tokenizer, random.Random(0), rewards=(1.0, 0.0, 1.0), origin="external", **nothing)
    (group,) = take_in(batch_of(1, [scored]), rules).groups
    assert len(group.completions) == 2
    assert group.advantages == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)
    # 63 right answers without tokens leave the one with tokens alone, and an answer alone has
    # nothing to be compared with.
    rewards = [1.0] * 63 + [0.0]
    many = scored_group(rules.tokenizer, random.Random(0), rewards=rewards, origin="external")
    empty = msgspec.structs.replace(many.group.completions[0], **nothing)
    group_of_many = msgspec.structs.replace(many.group, completions=[*[empty] * 63, many.group.completions[-1]])
    (group,) = take_in(batch_of(1, [msgspec.structs.replace(many, group=group_of_many)]), rules).groups
    assert list(group.advantages) == [0.0]


def test_a_foreign_advantage_is_bounded_and_a_local_one_is_not(rules: IntakeRules) -> None:
    bounded = replace(rules, max_foreign_advantage=2.0)
    rewards = (1.0,) * 15 + (0.0,)
    local = scored_group(rules.tokenizer, random.Random(0), rewards=rewards)
    foreign = scored_group(rules.tokenizer, random.Random(1), rewards=rewards, origin="external")
    ours, theirs = take_in(batch_of(1, [local, foreign]), bounded).groups
    assert ours.advantages[-1] == pytest.approx(-3.75, rel=1e-3) and theirs.advantages[-1] == -2.0
    assert theirs.advantages[0] == pytest.approx(0.25, rel=1e-3), "within the bound nothing changes"


def test_the_default_bound_is_beyond_every_group_of_eight_under_either_deviation() -> None:
    for ddof in (0, 1):
        (advantages,) = group_normalised([[1.0] + [0.0] * 7], std_ddof=ddof, std_eps=0.0)
        assert max(map(abs, advantages)) <= math.sqrt(7) + 1e-12


def test_a_foreign_group_beyond_its_budget_is_left_out_and_its_sender_counted(rules: IntakeRules) -> None:
    strict = replace(rules, usual_tokens=100, foreign_cost_factor=2.0)
    usual = [scored_group(rules.tokenizer, random.Random(seed), rewards=(1.0, 0.0)) for seed in range(4)]
    dear = scored_group(rules.tokenizer, random.Random(9), rewards=(1.0, 0.0) * 30, origin="external")
    intake = take_in(batch_of(1, [*usual, dear]), strict)
    assert (intake.local, intake.external, dict(intake.skipped)) == (4, 0, {"group_budget": 1})
    assert intake.over_budget_of == {"beta": 1}


def test_answers_cut_at_the_length_limit_are_left_out_and_stay_in_the_baseline(rules: IntakeRules) -> None:
    dropping = replace(rules, drop_truncated=True)
    scored = scored_group(rules.tokenizer, random.Random(0), rewards=(1.0, 0.0, 0.0), finish_reason="length")
    (whole,) = take_in(batch_of(1, [scored]), rules).groups
    (kept,) = take_in(batch_of(1, [scored]), dropping).groups
    assert kept.completions == whole.completions[1:] and kept.behaviour_logprobs == whole.behaviour_logprobs[1:]
    assert kept.advantages == whole.advantages[1:], "the cut answer's reward is still in the mean"


def test_a_group_of_cut_answers_alone_is_skipped_and_counted(rules: IntakeRules) -> None:
    scored = scored_group(rules.tokenizer, random.Random(0), rewards=(1.0, 0.0))
    group = scored.group
    cut = [msgspec.structs.replace(each, finish_reason="length") for each in group.completions]
    all_cut = msgspec.structs.replace(scored, group=msgspec.structs.replace(group, completions=cut))
    intake = take_in(batch_of(1, [all_cut, scored]), replace(rules, drop_truncated=True))
    assert dict(intake.skipped) == {"truncated": 1} and intake.local == 1 and len(intake.authors) == 1
    assert len(intake.rewards_local) == 2
    positives_cut = msgspec.structs.replace(
        all_cut, origin="external", group=msgspec.structs.replace(group, completions=[cut[0], group.completions[1]])
    )
    both = take_in(batch_of(1, [positives_cut]), replace(rules, drop_truncated=True, drop_foreign_negatives=True))
    assert not both.groups and dict(both.skipped) == {"negative": 1}


def test_lengths_and_each_of_several_rewards_are_recorded_of_local_answers_alone(rules: IntakeRules) -> None:
    rng = random.Random(0)
    local = [scored_group(rules.tokenizer, rng) for _ in range(2)]
    foreign = scored_group(rules.tokenizer, rng, origin="external")
    counts = [answer.token_count for each in local for answer in each.group.completions]
    size = len(local[0].rewards)
    parts = [{"accuracy": [1.0] * size, "format": [None] * size}, {"accuracy": [0.0] * size, "format": [0.5] * size}]
    scored = [msgspec.structs.replace(each, parts=values) for each, values in zip(local, parts, strict=True)]
    record = take_in(batch_of(1, [*scored, foreign]), rules).record()
    assert record.answer_tokens == pytest.approx(sum(counts) / len(counts))
    assert record.reward_parts == {"accuracy": 0.5, "format": 0.5}
    assert take_in(batch_of(1, [foreign]), rules).record().answer_tokens is None


def test_a_local_group_without_a_right_answer_is_counted_by_the_bonus_that_differs(rules: IntakeRules) -> None:
    rng = random.Random(0)
    right, wrong, partial = (scored_group(rules.tokenizer, rng) for _ in range(3))
    size = len(right.rewards)
    rewards, rising = [n / 10 for n in range(size)], [n / size for n in range(size)]
    values = {"rewards": rewards, "parts": {"accuracy": [0.0] * size, "short": rising}}
    right = msgspec.structs.replace(right, **values, passed=[True, *[False] * (size - 1)])
    wrong = msgspec.structs.replace(wrong, **values, passed=[False] * size)
    partial = msgspec.structs.replace(partial, rewards=rewards, parts={"accuracy": rising, "short": rising}, passed=[False] * size)
    record = take_in(batch_of(1, [right, wrong, partial]), rules).record()
    assert record.bonus_of == {"short": 1}, "where each of them differs, each keeps its weight"

"""What one hostile foreign group can do to a step of a real learner: with honest groups sampled
from models/base beside it.

What the bounds hold is a group's size. Beside an absurd, long or forged group the step keeps a
cosine of at least 0.85 with the step without it (an honest eighth group leaves 0.94), a norm
between a half and twice, and a cost of at most three times; beside one tuned to stay just below the
bound, at least 0.65. They do not hold its direction: likely text whose gradient opposes the others
is no larger than theirs (docs/security.md).
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from services.trainer.gradient import bounded_step
from services.trainer.gradient.bounded_step import (
    BoundedGradient,
    InfluenceRules,
    bounded_gradients,
    token_shares,
    usual_norm,
)
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import accumulate_gradients, accumulate_part, step_normaliser
from services.trainer.learner import Learner
from services.trainer.objectives.token_loss import divisor
from services.trainer.selection.intake import Intake, take_in
from shared.contracts.codec import pack_ids, pack_logprobs
from shared.contracts.messages import Completion, RolloutGroup, ScoredGroup
from shared.model.prompts import answer_text
from tests.integration.trainer_life import batch_of, node_config, scored_group, tiny_policy
from tests.long_forms import FULL
from tests.unit.honest_groups import base_config, sampled_groups, scored


@dataclass
class Step:
    gradient: Tensor
    bounded: BoundedGradient
    intake: Intake


def step_of(
    learner: Learner, groups: Sequence[ScoredGroup], rules: InfluenceRules | None = None, recent: Sequence[float] = ()
) -> Step:
    intake = take_in(batch_of(1, groups), learner.rules)
    learner.model.zero_grad(set_to_none=True)
    bounded = bounded_gradients(learner.model, intake.groups, learner.update_config, rules or learner._influence, recent=recent)
    return Step(_gradient(learner), bounded, intake)


def _gradient(learner: Learner) -> Tensor:
    return torch.cat([each.grad.flatten() for each in learner.model.parameters() if each.grad is not None])


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return Learner(base_config(tmp_path_factory.mktemp("run")))


def honest_batch(seed: int, count: int = 7) -> list[ScoredGroup]:
    picked = random.Random(seed).sample(sampled_groups(), count)
    return [
        scored(group, "local" if index < 2 else "external", node=None if index < 2 else f"peer-{index}")
        for index, group in enumerate(picked)
    ]


def rubbish(learner: Learner, tokens: int, count: int, seed: int = 0) -> list[Completion]:
    """Texts of about `tokens` random tokens each, as text only."""
    rng = random.Random(seed)
    readable = [token for token in range(3, len(learner.tokenizer)) if "\ufffd" not in answer_text(learner.tokenizer, [token])]
    texts = [answer_text(learner.tokenizer, rng.choices(readable, k=tokens)) for _ in range(count)]
    return [Completion(text=text, finish_reason="length", token_count=tokens) for text in texts]


def hostile(learner: Learner, kind: str) -> ScoredGroup:
    group = sampled_groups()[0]

    def made(completions: list[Completion], rewards: list[float]) -> ScoredGroup:
        return scored(msgspec.structs.replace(group, completions=completions, draw=10**6), "external", rewards, node="mallory")

    def with_tokens(ids: list[int], logprob: float, text: str, finish: str = "length") -> Completion:
        packed = {"token_ids": pack_ids(ids), "behaviour_logprobs": pack_logprobs([logprob] * len(ids))}
        return Completion(text=text, finish_reason=finish, token_count=len(ids), **packed)  # type: ignore[arg-type]

    right = group.completions[0]
    if kind == "eight long answers":
        return made(rubbish(learner, 900, 8), [1.0, 0.0] * 4)
    if kind == "as long as allowed":
        return made(rubbish(learner, 20, 8), [1.0, 0.0] * 4)
    if kind == "as many and as long as allowed":
        return made(rubbish(learner, 20, 16), [1.0, 0.0] * 8)
    if kind == "one wrong in many":
        return made(rubbish(learner, 12, 16), [1.0] * 15 + [0.0])
    if kind == "64 x 1,000 without likelihood":
        return made([with_tokens([5] * 1000, float("-inf"), "x") for _ in range(64)], [1.0, 0.0] * 32)
    if kind == "63 without tokens":
        empty = Completion(text="", finish_reason="length", token_count=0, token_ids=b"", behaviour_logprobs=b"")
        return made([empty] * 63 + [with_tokens([70, 71], -1.0, learner.tokenizer.decode([70, 71]))], [1.0] * 63 + [0.0])
    if kind == "63 right without ids":
        bare = msgspec.structs.replace(right, token_ids=b"", behaviour_logprobs=b"", token_count=0)
        return made([bare] * 63 + [right], [1.0] * 63 + [0.0])
    if kind == "likelier than it says":
        low = [with_tokens([7, 8, 9, 10], -40.0, learner.tokenizer.decode([7, 8, 9, 10])) for _ in range(8)]
        return made(low, [1.0, 0.0] * 4)
    assert kind == "other tokens"
    return made([with_tokens([7] * 16, -1.0, each.text) for each in group.completions], [1.0, 0.0] * 4)


SAME_RIGHT_ANSWER = 0.6
"""Least cosine beside one right answer 63 times over. Wrong answers of others teach nothing, so it
weighs more; and it is right.
"""

KINDS = [
    "eight long answers",
    "as long as allowed",
    "as many and as long as allowed",
    "one wrong in many",
    "64 x 1,000 without likelihood",
    "63 without tokens",
    "63 right without ids",
    "likelier than it says",
    "other tokens",
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_group_turns_or_drowns_the_step_of_seven_honest_ones(learner: Learner, kind: str) -> None:
    for seed in (0, 1) if FULL else (0,):
        honest = honest_batch(seed)
        alone = step_of(learner, honest)
        beside = step_of(learner, [*honest, hostile(learner, kind)])
        cosine = float(torch.cosine_similarity(alone.gradient, beside.gradient, dim=0))
        ratio = float(beside.gradient.norm() / alone.gradient.norm())
        assert cosine >= (SAME_RIGHT_ANSWER if kind == "63 right without ids" else 0.85), (kind, cosine, beside.bounded.scales)
        assert 0.5 <= ratio <= 2.0, (kind, ratio)
        assert beside.bounded.stats.padded_tokens <= 3 * alone.bounded.stats.padded_tokens


@pytest.mark.slow
def test_a_sender_who_stays_just_below_the_bound_turns_the_step_little(learner: Learner) -> None:
    """A weight stands for text of any strength between ordinary and absurd."""
    honest = honest_batch(0)
    alone = step_of(learner, honest)
    intake = take_in(batch_of(1, [*honest, hostile(learner, "as long as allowed")]), learner.rules)
    cosines = []
    for weight in (0.002, 0.005, 0.01, 0.015, 0.02, 0.022, 0.025, 0.05, 0.2) if FULL else (0.01, 0.02, 0.05):
        groups = [*intake.groups[:-1], replace(intake.groups[-1], weight=weight)]
        learner.model.zero_grad(set_to_none=True)
        bounded_gradients(learner.model, groups, learner.update_config, learner._influence)
        cosines.append(float(torch.cosine_similarity(alone.gradient, _gradient(learner), dim=0)))
    assert min(cosines) >= 0.65, cosines


@pytest.mark.slow
def test_eight_answers_of_thousands_of_characters_do_not_turn_the_step_where_answers_may_be_long(tmp_path: Path) -> None:
    """512 tokens are allowed here. Without bounds the cosine is 0.02 and the norm thirtyfold."""
    roomy = Learner(base_config(tmp_path, generator={"max_new_tokens": 256}))
    honest = honest_batch(0)
    alone = step_of(roomy, honest)
    texts = rubbish(roomy, 400, 8)
    assert min(len(each.text) for each in texts) > 1000
    hostile_group = msgspec.structs.replace(sampled_groups()[0], completions=texts, draw=10**6)
    beside = step_of(roomy, [*honest, scored(hostile_group, "external", [1.0, 0.0] * 4, node="mallory")])
    assert beside.intake.groups[-1].share < 0.1 and list(beside.bounded.scales) == [len(honest)]
    assert float(torch.cosine_similarity(alone.gradient, beside.gradient, dim=0)) >= 0.85
    assert 0.5 <= float(beside.gradient.norm() / alone.gradient.norm()) <= 2.0


@pytest.mark.slow
def test_an_honest_eighth_group_is_no_suspect(learner: Learner) -> None:
    for seed in range(4 if FULL else 2):
        groups = honest_batch(seed, count=8)
        found = step_of(learner, groups)
        assert found.bounded.scales == {} and not found.intake.skipped
        assert all(group.share == 1.0 for group in found.intake.groups)


@pytest.mark.slow
def test_within_its_bounds_a_gradient_is_the_plain_sum_bit_for_bit(learner: Learner) -> None:
    for seed in range(3 if FULL else 1):
        found = step_of(learner, honest_batch(seed, count=8))
        groups = [replace_share(group) for group in found.intake.groups]
        normaliser = step_normaliser(groups, learner.update_config)
        total = torch.zeros_like(found.gradient)
        local = [number for number, group in enumerate(groups) if group.is_local]
        for numbers in (local, *([number] for number in range(len(groups)) if number not in local)):
            learner.model.zero_grad(set_to_none=True)
            accumulate_part(learner.model, groups, numbers, learner.update_config, normaliser)
            total += _gradient(learner)
        assert torch.equal(found.gradient, total)


def replace_share(group: TokenGroup) -> TokenGroup:
    assert group.share == 1.0
    return group


def test_a_batch_of_local_groups_has_the_gradient_it_always_had(learner: Learner) -> None:
    groups = [scored(group, "local") for group in sampled_groups()[:6]]
    found = step_of(learner, groups)
    learner.model.zero_grad(set_to_none=True)
    accumulate_gradients(learner.model, found.intake.groups, learner.update_config)
    assert torch.equal(found.gradient, _gradient(learner))
    assert found.bounded.foreign_norm is None and found.bounded.local_norm == pytest.approx(float(found.gradient.norm()), rel=1e-4)


def passes_with_gradient(
    learner: Learner, groups: Sequence[ScoredGroup], monkeypatch: pytest.MonkeyPatch, recent: Sequence[float] = ()
) -> tuple[set[int], Step]:
    """How often a step passed each of its groups through the model with a gradient."""
    passes: Counter[int] = Counter()

    def counted(model: Any, groups: Any, numbers: Sequence[int], *rest: Any, **named: Any) -> Any:
        passes.update(numbers)
        return accumulate_part(model, groups, numbers, *rest, **named)

    monkeypatch.setattr(bounded_step, "accumulate_part", counted)
    found = step_of(learner, groups, recent=recent)
    monkeypatch.undo()
    return set(passes.values()), found


def scaled_sum(learner: Learner, found: Step) -> Tensor:
    """The gradient of a step whose scales are known, computed at once."""
    groups = [
        replace(group, weight=group.weight * found.bounded.scales.get(index, 1.0))
        for index, group in enumerate(found.intake.groups)
    ]
    learner.model.zero_grad(set_to_none=True)
    normaliser = step_normaliser(found.intake.groups, learner.update_config)
    accumulate_part(learner.model, groups, range(len(groups)), learner.update_config, normaliser)
    return _gradient(learner)


@pytest.mark.parametrize("kind", [None, "as long as allowed"])
def test_each_group_is_computed_once_with_a_gradient_whatever_it_does(
    learner: Learner, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [*honest_batch(0), *([hostile(learner, kind)] if kind else [])]
    passes, found = passes_with_gradient(learner, groups, monkeypatch)
    assert passes == {1} and len(found.bounded.scales) == (kind is not None)
    assert torch.allclose(found.gradient, scaled_sum(learner, found), rtol=1e-4, atol=1e-6)

    alone = [replace_origin(each) for each in groups]
    passes, without_local = passes_with_gradient(learner, alone, monkeypatch, recent=found.bounded.recent)
    assert passes == {1} and len(without_local.bounded.scales) == (kind is not None)
    assert without_local.bounded.local_norm is None and without_local.bounded.recent == found.bounded.recent
    assert torch.allclose(without_local.gradient, scaled_sum(learner, without_local), rtol=1e-4, atol=1e-6)


def test_a_node_without_any_local_gradient_yet_computes_foreign_groups_twice_only_if_one_is_scaled(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = [replace_origin(each) for each in honest_batch(0, count=6)]
    passes, found = passes_with_gradient(learner, foreign[:4], monkeypatch)
    assert found.bounded.scales == {} and passes == {1} and len(found.bounded.recent) == 1
    passes, found = passes_with_gradient(learner, [*foreign, hostile(learner, "as long as allowed")], monkeypatch)
    (number,) = found.bounded.scales
    assert found.intake.authors[number][0] == "mallory" and passes == {2}
    assert torch.allclose(found.gradient, scaled_sum(learner, found), rtol=1e-4, atol=1e-6)


def replace_origin(group: ScoredGroup) -> ScoredGroup:
    return msgspec.structs.replace(group, origin="external")


def test_turned_off_nothing_is_measured_and_the_gradient_is_the_plain_sum(learner: Learner) -> None:
    intake = take_in(batch_of(1, [*honest_batch(0), hostile(learner, "as long as allowed")]), learner.rules)
    learner.model.zero_grad(set_to_none=True)
    found = bounded_gradients(learner.model, intake.groups, learner.update_config, InfluenceRules())
    assert found.foreign_norm is None and found.scales == {} and float(_gradient(learner).norm()) > 2.0


def test_the_norms_with_and_without_foreign_groups_are_those_of_the_parts(learner: Learner) -> None:
    honest = honest_batch(3, count=8)
    found = step_of(learner, honest)
    groups, config = found.intake.groups, learner.update_config
    normaliser = step_normaliser(groups, config)

    def norm(numbers: Sequence[int]) -> float:
        learner.model.zero_grad(set_to_none=True)
        accumulate_part(learner.model, groups, numbers, config, normaliser)
        return float(_gradient(learner).norm())

    local = [number for number, group in enumerate(groups) if group.is_local]
    alone = [norm([number]) for number in range(len(groups)) if number not in local]
    assert found.bounded.local_norm == pytest.approx(norm(local), rel=1e-4)
    assert found.bounded.foreign_norm == pytest.approx(math.sqrt(sum(each**2 for each in alone)), rel=1e-4)


@pytest.mark.slow
def test_several_hostile_groups_of_one_sender_are_each_held_to_the_bound(learner: Learner) -> None:
    honest = honest_batch(5, count=6)
    alone = step_of(learner, honest)
    others = [
        scored(
            msgspec.structs.replace(sampled_groups()[0], completions=rubbish(learner, 16, 8, seed), draw=10**6 + seed),
            "external",
            [1.0, 0.0] * 4,
            node="mallory",
        )
        for seed in range(3)
    ]
    beside = step_of(learner, [*honest, *others])
    assert len(beside.bounded.scales) == 3
    assert float(torch.cosine_similarity(alone.gradient, beside.gradient, dim=0)) >= 0.6


# A learner of forged tokens ends where one of the same texts ends.


def forged_group(tokenizer: Any, seed: int) -> tuple[ScoredGroup, ScoredGroup, list[int]]:
    """A foreign group with ordinary texts and the tokens of a backdoor; the same texts without
    tokens; the backdoor.
    """
    honest = scored_group(tokenizer, random.Random(seed), origin="external")
    backdoor = tokenizer("OBEY", add_special_tokens=False)["input_ids"] + [256]
    packed = {
        "token_ids": pack_ids(backdoor),
        "token_count": len(backdoor),
        "behaviour_logprobs": pack_logprobs([-1.0] * len(backdoor)),
    }
    forged = [msgspec.structs.replace(each, **packed) for each in honest.group.completions]
    bare = [msgspec.structs.replace(each, token_ids=None, behaviour_logprobs=None) for each in honest.group.completions]

    def of(completions: list[Completion], prompt_ids: bytes | None) -> ScoredGroup:
        group: RolloutGroup = msgspec.structs.replace(honest.group, completions=completions, prompt_ids=prompt_ids)
        return msgspec.structs.replace(honest, group=group)

    return of(forged, pack_ids([66, 65, 68])), of(bare, None), backdoor


@pytest.mark.slow
def test_a_learner_beside_one_forged_group_in_eight_ends_with_the_weights_of_an_honest_one(tmp_path: Path) -> None:
    model = tiny_policy(tmp_path / "tiny")
    forged, honest = (Learner(node_config(model, tmp_path)) for _ in range(2))
    for number in range(1, 9):
        rng = random.Random(number)
        others = [scored_group(forged.tokenizer, rng, origin="local" if index < 2 else "external") for index in range(7)]
        hostile_group, texts_only, _ = forged_group(forged.tokenizer, number)
        forged.step(batch_of(number, [*others, hostile_group]))
        honest.step(batch_of(number, [*others, texts_only]))
    left, right = forged.policy(), honest.policy()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_the_step_s_record_says_whose_groups_were_bounded_or_too_dear(tmp_path: Path, learner: Learner) -> None:
    # Without the own-policy check, which would leave the absurd answers out before they are
    # measured.
    trained = Learner(base_config(tmp_path, trainer={"constants": {"policy_check_fraction": 0.0}}))
    dear = scored(
        msgspec.structs.replace(sampled_groups()[1], completions=rubbish(learner, 12, 128), draw=7),
        "external",
        [1.0, 0.0] * 64,
        node="big",
    )
    record = trained.step(batch_of(1, [*honest_batch(0), hostile(learner, "as long as allowed"), dear]))
    assert record.bounded_of == {"mallory": 1} and record.groups_bounded == 1
    assert record.skipped == {"group_budget": 1} and record.over_budget_of == {"big": 1}
    assert record.grad_norm_local is not None and record.grad_norm_foreign is not None
    assert record.grad_norm_foreign > 5 * record.grad_norm_local > 0
    assert record.grad_norm < 3 * record.grad_norm_local


@pytest.mark.slow
def test_what_the_sequence_mask_drops_leaves_the_step_as_if_it_had_not_come(tmp_path: Path) -> None:
    """With one update a batch too, where nothing but the mask asks for the logprobs beforehand."""
    masked = {"trainer": {"constants": {"sequence_mask": (0.5, 2.0)}}}
    beside, alone = (Learner(base_config(tmp_path / name, **copy.deepcopy(masked))) for name in ("beside", "alone"))
    honest = honest_batch(0)
    group = sampled_groups()[1]
    unlikely = [
        msgspec.structs.replace(each, behaviour_logprobs=pack_logprobs([-20.0] * each.token_count)) for each in group.completions
    ]
    claimed = scored(
        msgspec.structs.replace(group, completions=unlikely, draw=7), "external", [1.0, 0.0] * (len(unlikely) // 2), node="mallory"
    )
    left, right = beside.step(batch_of(1, [*honest, claimed])), alone.step(batch_of(1, honest))
    assert left.groups_external == right.groups_external + 1
    assert left.grad_norm == pytest.approx(right.grad_norm, rel=1e-4)
    assert left.grad_norm_local == pytest.approx(right.grad_norm_local, rel=1e-4)


# The arithmetic.


def tokens(*lengths: int, local: bool) -> TokenGroup:
    return TokenGroup(
        prompt_ids=[1],
        completions=[[2] * length for length in lengths],
        behaviour_logprobs=[None] * len(lengths),
        advantages=[1.0] * len(lengths),
        is_local=local,
    )


def test_a_foreign_group_counts_for_no_more_tokens_than_a_few_usual_ones() -> None:
    groups = [tokens(5, 5, local=True), tokens(10, local=False), tokens(100, local=False), tokens(200, local=True)]
    assert token_shares(groups[:3], 4.0, [1.0] * 3) == [1.0, 1.0, 0.4]
    assert token_shares(groups[:3], 4.0, [1.0, 1.0, 0.5]) == [1.0, 1.0, 0.2], "half of it is left out: half is usual"
    assert token_shares(groups, 4.0, [1.0] * 4) == [1.0, 1.0, 1.0, 1.0], "a local group as long says that this is usual"
    assert token_shares([], 4.0, []) == []


def test_a_group_beyond_the_bound_counts_as_a_usual_one() -> None:
    rules = InfluenceRules(factor=2.0)
    assert [rules.scale(norm, 1.0) for norm in (0.5, 2.0, 2.5, 100.0)] == pytest.approx([1.0, 1.0, 0.4, 0.01])
    assert [rules.scale(norm, 1.0) for norm in (math.nan, math.inf)] == [0.0, 0.0]


def test_what_is_usual_is_the_mean_of_the_last_local_groups(learner: Learner) -> None:
    assert usual_norm([]) is None and usual_norm([3.0, 4.0]) == pytest.approx(math.sqrt(12.5))
    found = step_of(learner, honest_batch(0), recent=[1.0] * 20)
    size = divisor(learner.update_config.objective, step_normaliser(found.intake.groups, learner.update_config))
    assert found.bounded.local_norm is not None
    local = found.bounded.local_norm / math.sqrt(2) * size
    assert found.bounded.recent == pytest.approx([1.0] * 14 + [local] * 2)

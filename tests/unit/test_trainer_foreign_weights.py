"""Weights of foreign completions: every choice of level and sign against loops, and worked out by
hand for TOPR.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch

from services.trainer.gradient.importance import (
    ForeignRules,
    ImportanceConfig,
    ImportanceWeights,
    WeightLevel,
    WeightRule,
    foreign_rows,
    importance_weights,
    kept_tokens,
)
from services.trainer.gradient.rows import TextLogprob, TokenGroup
from services.trainer.gradient.update import UpdateConfig, batch_logprobs, step_normaliser
from services.trainer.learner import Learner
from services.trainer.selection.intake import take_in
from services.verifier.episodes import without_token_ids
from shared.contracts.codec import pack_logprobs
from tests.integration.trainer_life import batch_of, node_config, scored_group, tiny_policy

CAP = 2.0


def weigh(rules: ForeignRules, groups: list[TokenGroup], proximal: list[list[list[float]]]) -> ImportanceWeights:
    """Of every completion, a row each, in the groups' order; `proximal[group][completion]`."""
    sequences = [(g, c) for g, group in enumerate(groups) for c in range(len(group.completions))]
    longest = max(length for group in groups for length in group.completion_lengths)

    def padded(values: Any) -> torch.Tensor:
        rows = torch.full((len(sequences), longest), math.nan, dtype=torch.float64)
        for row, (g, c) in enumerate(sequences):
            if values[g][c] is not None:
                rows[row, : len(values[g][c])] = torch.tensor(list(values[g][c]), dtype=torch.float64)
        return rows

    lengths = torch.tensor([groups[g].completion_lengths[c] for g, c in sequences])
    return importance_weights(
        ImportanceConfig(cap=CAP, foreign=rules),
        proximal_logprobs=padded(proximal),
        behaviour_logprobs=padded([group.behaviour_logprobs for group in groups]),
        has_behaviour=torch.tensor([groups[g].behaviour_logprobs[c] is not None for g, c in sequences]),
        mask=torch.arange(longest) < lengths.unsqueeze(1),
        foreign=foreign_rows(groups, sequences, torch.device("cpu")),
    )


def numpy_weights(rules: ForeignRules, group: TokenGroup, number: int, proximal: list[float]) -> tuple[list[float], list[bool]]:
    """One completion, one token after the other, from the formulas: weights and what is kept."""
    behaviour, text, advantage = group.behaviour_logprobs[number], group.text_logprob(number), group.advantages[number]
    tokens = range(len(proximal))
    known = [t for t in tokens if behaviour is not None and math.isfinite(behaviour[t])]
    kept = [behaviour is None or t in known for t in tokens]
    if group.is_local or (behaviour is None and text is None):
        rule = rules.negative if advantage < 0 else rules.positive
        weights = [min(math.exp(proximal[t] - behaviour[t]), CAP) if t in known else 1.0 for t in tokens]
        return ([1.0 for _ in tokens] if rule == "one" and not group.is_local else weights), kept
    if behaviour is not None:
        total = sum(proximal[t] - behaviour[t] for t in known)
        mean = total / len(known)
    else:
        total = sum(proximal) - text.total
        mean = float(np.mean(proximal)) - text.total / text.tokens
    rule = rules.negative if advantage < 0 else rules.positive
    weights = []
    for t in tokens:
        if rules.level == "token":
            ratio = math.exp(proximal[t] - behaviour[t]) if t in known else 1.0
        else:
            ratio = math.exp(mean if rules.level == "geometric_mean" else total)
        weights.append({"capped": min(ratio, CAP), "at_most_one": min(ratio, 1.0), "one": 1.0}[rule])
    if rules.negative_divergence is not None and advantage < 0 and -mean > rules.negative_divergence:
        kept = [False for _ in tokens]
    return weights, kept


def random_groups(seed: int) -> tuple[list[TokenGroup], list[list[list[float]]]]:
    """Local ones, foreign ones of known tokens, and foreign text of which some authors say how
    likely they found it.
    """
    rng = np.random.default_rng(seed)
    groups, proximal = [], []
    for index in range(6):
        lengths = [int(rng.integers(1, 7)) for _ in range(4)]
        own = [(-rng.exponential(1.5, length)).tolist() for length in lengths]
        behaviour: list[Any] = [(np.array(each) + rng.normal(0.2, 0.8, len(each))).tolist() for each in own]
        texts: list[TextLogprob | None] = [None] * 4
        if index % 3 == 2:
            behaviour = [None] * 4
            texts = [TextLogprob(-float(rng.exponential(4.0)), int(rng.integers(1, 9))) if n % 2 else None for n in range(4)]
        elif len(behaviour[0]) > 1:
            behaviour[0][0] = -math.inf
        groups.append(
            TokenGroup(
                prompt_ids=[1],
                completions=[[1] * length for length in lengths],
                behaviour_logprobs=behaviour,
                advantages=rng.normal(size=4).tolist(),
                is_local=index % 3 == 0,
                text_logprobs=texts,
            )
        )
        proximal.append(own)
    return groups, proximal


CHOICES = list(itertools.product(get_args(WeightLevel), get_args(WeightRule), get_args(WeightRule)))


@pytest.mark.slow
@pytest.mark.parametrize(("level", "positive", "negative"), CHOICES)
def test_every_level_and_sign_equals_a_loop(level: WeightLevel, positive: WeightRule, negative: WeightRule) -> None:
    for seed, divergence in itertools.product(range(4), (None, 0.3)):
        rules = ForeignRules(level=level, positive=positive, negative=negative, negative_divergence=divergence)
        groups, proximal = random_groups(seed)
        if level == "token" and divergence is None:
            groups = [replace(group, text_logprobs=()) for group in groups]
        found = weigh(rules, groups, proximal)
        row = 0
        for group, group_logprobs in zip(groups, proximal, strict=True):
            for number, own in enumerate(group_logprobs):
                weights, kept = numpy_weights(rules, group, number, own)
                if level == "token" and group.behaviour_logprobs[number] is None:
                    weights = [1.0] * len(own)  # A text's sum is not compared token by token.
                assert found.keep[row, : len(own)].tolist() == kept, (seed, row)
                ours = [weight for weight, keep in zip(found.weights[row].tolist(), kept, strict=False) if keep]
                assert ours == pytest.approx([weight for weight, keep in zip(weights, kept, strict=True) if keep], rel=1e-9)
                config = ImportanceConfig(cap=CAP, foreign=rules)
                assert kept_tokens(config, group, number, torch.tensor(own, dtype=torch.float64)) == sum(kept)
                row += 1


# Ratios to the author 0.5, 4 and 1: product 2, geometric mean 1.26.
FOREIGN = TokenGroup(
    prompt_ids=[1],
    completions=[[1, 2, 3], [1, 2, 3]],
    behaviour_logprobs=[[-2.0 - math.log(ratio) for ratio in (0.5, 4.0, 1.0)]] * 2,
    advantages=[1.0, -1.0],
    is_local=False,
)
PROXIMAL = [[[-2.0] * 3, [-2.0] * 3]]


def test_topr_leaves_positive_ones_alone_and_pushes_negative_ones_no_harder_than_this_nodes_policy_would() -> None:
    topr = weigh(ForeignRules(positive="one", negative="at_most_one"), [FOREIGN], PROXIMAL)
    assert topr.weights.tolist() == [pytest.approx([1.0, 1.0, 1.0]), pytest.approx([0.5, 1.0, 1.0])]
    assert topr.truncated[1].tolist() == [False, True, False]
    mean = weigh(ForeignRules(level="geometric_mean"), [FOREIGN], PROXIMAL)
    assert mean.weights[0].tolist() == pytest.approx([2.0 ** (1 / 3)] * 3)
    sequence = weigh(ForeignRules(level="sequence", negative="at_most_one"), [FOREIGN], PROXIMAL)
    assert sequence.weights.tolist() == [pytest.approx([2.0] * 3), pytest.approx([1.0] * 3)]


@pytest.mark.parametrize("claim", [-1.0, 3.0e38 / 10], ids=["one unlikely token", "an absurd claim"])
@pytest.mark.parametrize("level", ["geometric_mean", "sequence"])
def test_one_token_counts_in_full_in_an_answer_s_mean_and_sum(level: WeightLevel, claim: float) -> None:
    """Bounds are for the weight, not for what it is a mean of: 60 nats at one token of ten are 6 in
    the mean.
    """
    proximal = [-61.0] + [-1.0] * 9
    group = TokenGroup(
        prompt_ids=[1],
        completions=[range(10)],
        behaviour_logprobs=[[-1.0 if claim == -1.0 else claim] + [-1.0] * 9],
        advantages=[-1.0],
        is_local=False,
    )
    rules = ForeignRules(level=level, negative="at_most_one", negative_divergence=2.5)
    found = weigh(rules, [group], [[proximal]])
    expected = math.exp(-6.0 if level == "geometric_mean" and claim == -1.0 else -20.0)
    assert torch.allclose(found.weights, torch.full_like(found.weights, expected), rtol=1e-6)
    assert not found.keep.any()


def test_only_what_a_rule_cuts_is_called_truncated() -> None:
    up_and_down = [math.log(4.0), -math.log(4.0)] * 2
    group = TokenGroup(prompt_ids=[1], completions=[range(4)], behaviour_logprobs=[[-2.0] * 4], advantages=[1.0], is_local=False)
    proximal = [[[-2.0 + ratio for ratio in up_and_down]]]

    def cut(**rules: Any) -> list[bool]:
        return weigh(ForeignRules(**rules), [group], proximal).truncated[0].tolist()

    assert cut(level="geometric_mean") == [False] * 4
    assert cut(positive="one") == [False] * 4
    assert cut(level="geometric_mean", positive="one") == [False] * 4
    assert cut(positive="at_most_one") == cut() == [True, False, True, False]


def test_local_completions_are_weighed_as_ever() -> None:
    local = replace(FOREIGN, is_local=True)
    found = weigh(ForeignRules(level="sequence", positive="one", negative="one", negative_divergence=0.0), [local], PROXIMAL)
    assert found.weights.tolist() == [pytest.approx([0.5, 2.0, 1.0])] * 2 and found.keep.all()


@pytest.mark.slow
def test_the_filter_of_negative_advantages_is_that_of_trl() -> None:
    trl = pytest.importorskip("trl")
    generator = torch.Generator().manual_seed(0)
    behaviour = -torch.rand(8, 5, generator=generator, dtype=torch.float64) * 3
    own = behaviour + torch.randn(8, 5, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    mask = torch.ones(8, 5, dtype=torch.bool)
    theirs = trl.GRPOTrainer.get_off_policy_mask(advantages.unsqueeze(1), own, behaviour, mask.double(), 0.1).bool()
    group = TokenGroup(
        prompt_ids=[1],
        completions=[[1] * 5] * 8,
        behaviour_logprobs=behaviour.tolist(),
        advantages=advantages.tolist(),
        is_local=False,
    )
    ours = weigh(ForeignRules(negative_divergence=0.1), [group], [own.tolist()]).keep
    assert 0 < int((~theirs).sum()) < 4, "some negative ones must stay and some go"
    assert torch.equal(ours, theirs.expand_as(ours))


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": "word"},
        {"positive": "two"},
        {"negative": "none"},
        {"negative_divergence": -1.0},
        {"negative_divergence": math.nan},
    ],
)
def test_rules_that_say_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ForeignRules(**wrong)


# From the message to the step.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


def learner(model: Path, **trainer: Any) -> Learner:
    return Learner(
        node_config(
            model, model.parent, trainer={**trainer, "constants": {"policy_check_fraction": 0.0, "drop_foreign_negatives": False}}
        )
    )


def other_tokenizers_batch(of: Learner, logprob: float = -1.5) -> Any:
    scored = scored_group(of.tokenizer, random.Random(4), origin="external", same_tokenizer=False)
    logprobs = pack_logprobs([logprob, 2 * logprob, 3 * logprob])
    completions = [
        msgspec.structs.replace(each, token_count=3, token_ids=b"\0" * 12, behaviour_logprobs=logprobs)
        for each in scored.group.completions
    ]
    group = without_token_ids(msgspec.structs.replace(scored.group, completions=completions))
    assert all(each.token_ids is None and each.behaviour_logprobs for each in group.completions)
    return batch_of(1, [msgspec.structs.replace(scored, group=group)])


def test_what_ships_is_one_sided_by_token(model: Path) -> None:
    assert learner(model).update_config.importance.foreign == ForeignRules(positive="one", negative="at_most_one")


def test_a_text_of_another_tokenizer_is_weighed_by_its_authors_mean_logprob(model: Path) -> None:
    trained = learner(model, foreign_weight_level="geometric_mean", foreign_weight_positive="at_most_one", learning_rate=1e-9)
    batch = other_tokenizers_batch(trained)
    (group,) = take_in(batch, trained.rules).groups
    assert group.behaviour_logprobs == [None] * 4
    assert [text.total for text in group.text_logprobs if text] == pytest.approx([-9.0] * 4)
    (own,) = batch_logprobs(trained.model, [group], trained.update_config)
    lengths = np.array([len(each) for each in own])
    ratios = np.array([math.exp(float(each.double().mean()) + 3.0) for each in own])
    expected = float((np.minimum(ratios, 1.0) * lengths).sum() / lengths.sum())
    assert expected < 0.5, "the tiny policy finds every token unlikely"
    assert trained.step(batch).importance_weight == pytest.approx(expected, rel=1e-5)
    assert learner(model).step(batch).importance_weight == 1.0, "by default a sum over another tokenizer's tokens weighs nothing"


def test_negative_foreign_completions_are_dropped_and_stay_in_the_baseline(model: Path) -> None:
    trained = learner(model, drop_foreign_negatives=True)
    rng = random.Random(5)
    local = scored_group(trained.tokenizer, rng, rewards=(1.0, 0.0, 0.0))
    foreign = scored_group(trained.tokenizer, rng, rewards=(1.0, 0.0, 0.0), origin="external")
    whole, kept = take_in(batch_of(1, [local, foreign]), trained.rules).groups
    assert whole.advantages == pytest.approx([2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)], rel=1e-3)
    assert kept.advantages == whole.advantages[:1] and len(kept.completions) == 1


def test_negative_local_completions_are_dropped_alike_where_that_is_asked_for_and_replayed_ones_too(model: Path) -> None:
    trained = learner(model, drop_local_negatives=True)
    rng = random.Random(5)
    local, again, foreign = (
        scored_group(trained.tokenizer, rng, rewards=(1.0, 0.0, 0.0), origin=origin) for origin in ("local", "local", "external")
    )
    batch = batch_of(1, [local, again, foreign])
    batch.items[1] = msgspec.structs.replace(batch.items[1], replayed=True)
    kept, replayed, whole = take_in(batch, trained.rules).groups
    assert kept.advantages == replayed.advantages == whole.advantages[:1] and len(whole.completions) == 3


def test_what_the_divergence_drops_does_not_count_in_the_divisor(model: Path) -> None:
    trained = learner(model, foreign_negative_divergence=0.0, importance_cap=1.0)
    batch = batch_of(1, [scored_group(trained.tokenizer, random.Random(6), origin="external")])
    (group,) = take_in(batch, trained.rules).groups
    config = trained.update_config
    proximal = batch_logprobs(trained.model, [group], config)
    positive = sum(
        length
        for length, advantage, logprobs, behaviour in zip(
            group.completion_lengths, group.advantages, proximal[0], group.behaviour_logprobs, strict=True
        )
        if advantage > 0 or float(logprobs.double().mean()) >= sum(behaviour or ()) / len(behaviour or ())
    )
    assert positive < sum(group.completion_lengths)
    assert step_normaliser([group], config, proximal).tokens == positive
    assert trained.step(batch).dropped_fraction == pytest.approx(1 - positive / sum(group.completion_lengths))


def test_the_rows_of_a_step_know_whose_they_are() -> None:
    groups, _ = random_groups(0)
    rows = foreign_rows(groups, [(0, 1), (2, 1), (2, 2)], torch.device("cpu"))
    assert rows.is_foreign.tolist() == [False, True, True]
    assert rows.text_tokens[1] == groups[2].text_logprobs[1].tokens and rows.text_tokens[2] == 0  # type: ignore[union-attr]
    assert rows.advantages.tolist() == [groups[0].advantages[1], *groups[2].advantages[1:3]]
    assert UpdateConfig().importance.foreign == ForeignRules()

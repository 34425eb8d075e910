"""What a trainer writes down of a step is what its gradient used: the gradient can be computed
again from the record, with nothing of the trainer's own.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from services.trainer.gradient.answer_uses import shown_places
from services.trainer.learner import Learner
from services.trainer.records import MAX_LINE_BYTES, trained_line
from shared.contracts.codec import pack_logprobs, unpack_ids
from shared.contracts.messages import Batch, Places, ScoredGroup
from shared.model.prompts import render_prompt
from tests.integration.trainer_life import batch_of, node_config, scored_group, tiny_policy

EXTERNAL_WEIGHT = 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


def learner(model: Path, **trainer: Any) -> Learner:
    settings = {
        "grad_clip": 0.0,
        "constants": {
            "external_weight": EXTERNAL_WEIGHT,
            "policy_check_fraction": 0.0,
            "foreign_weight_level": "geometric_mean",
            "foreign_weight_positive": "capped",
            "foreign_weight_negative": "capped",
            "drop_foreign_negatives": False,
            "weight_decay": 0.0,
        },
    }
    return Learner(node_config(model, model.parent, trainer={**settings, **trainer}))


def token_logprobs(trainer: Learner, scored: ScoredGroup, place: int) -> Tensor:
    """Of one answer's tokens, by a plain forward pass over prompt and answer alone. A foreign
    group's prompt is rendered here.
    """
    group = scored.group
    own = (
        unpack_ids(group.prompt_ids or b"") if scored.origin == "local" else render_prompt(trainer.tokenizer, group.task.prompt, "")
    )
    prompt, answer = list(own), unpack_ids(group.completions[place].token_ids or b"")
    logits = trainer.model(torch.tensor([[*prompt, *answer]])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=1)[range(len(answer)), answer]


def sampled_by(trainer: Learner, scored: ScoredGroup, shifts: list[float]) -> ScoredGroup:
    """As if its policy had found each token of answer i less likely, by `shifts[i]` nats."""
    completions = []
    for place, shift in enumerate(shifts):
        with torch.no_grad():
            behaviour = (token_logprobs(trainer, scored, place) - shift).clamp(max=0.0).tolist()
        completions.append(msgspec.structs.replace(scored.group.completions[place], behaviour_logprobs=pack_logprobs(behaviour)))
    return msgspec.structs.replace(scored, group=msgspec.structs.replace(scored.group, completions=completions))


def standardised(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / deviation if deviation else 0.0 for reward in rewards]


def written(of: Learner, batch: Batch) -> dict[str, Any]:
    line = trained_line(batch.number, 1.0, updated=True, updates=1, groups=of.trained)
    found: dict[str, Any] = json.loads(line)
    return found


def test_the_gradient_follows_from_the_record_alone(model: Path) -> None:
    trainer = learner(model, foreign_norm_factor=0.1)
    rng, tokenizer = random.Random(5), trainer.tokenizer
    groups = [
        sampled_by(trainer, scored_group(tokenizer, rng), [-2.0, -2.0, -2.5, -3.0]),
        scored_group(tokenizer, rng, rewards=(1.0, 1.0)),
        sampled_by(trainer, scored_group(tokenizer, rng, origin="external", rewards=(0.0, 1.0, 1.0)), [0.2, -0.3, 3.0]),
        sampled_by(trainer, scored_group(tokenizer, rng, origin="external", rewards=(0.5, 0.0)), [0.0, 0.0]),
    ]
    batch = batch_of(1, groups)
    before = [parameter.detach().clone() for parameter in trainer._parameters]
    policy = {id(parameter): old for parameter, old in zip(trainer._parameters, before, strict=True)}
    trainer.step(batch)
    beta = trainer._config.constants.betas[0]
    applied = [trainer._optimizer.state[parameter]["exp_avg"] / (1 - beta) for parameter in trainer._parameters]
    record = written(trainer, batch)

    with torch.no_grad():
        for parameter in trainer._parameters:
            parameter.copy_(policy[id(parameter)])
    loss, kept = torch.zeros(()), 0.0
    for scored, line in zip(groups, record["groups"], strict=True):
        assert line["id"] == scored.group_id and line["sender"] == scored.group.node
        if line["fate"] != "trained":
            continue
        assert [answer["advantage"] for answer in line["answers"]] == pytest.approx(standardised(scored.rewards), rel=1e-3)
        for answer in line["answers"]:
            logprobs = token_logprobs(trainer, scored, answer["place"])
            assert answer["kept"] == answer["tokens"] == len(logprobs)
            loss = loss - line["factor"] * answer["advantage"] * answer["weight"] * logprobs.sum()
            kept += len(logprobs)
    again = torch.autograd.grad(loss / kept, trainer._parameters)

    flat, wanted = (torch.cat([each.flatten() for each in parts]) for parts in (applied, again))
    torch.testing.assert_close(flat, wanted, rtol=2e-3, atol=2e-5 * float(wanted.abs().max()))
    fates = [line["fate"] for line in record["groups"]]
    assert fates == ["trained", "no_advantage", "trained", "trained"]
    weights = [[answer["weight"] for answer in record["groups"][number]["answers"]] for number in (0, 2)]
    assert weights[0] == pytest.approx([math.exp(shift) for shift in (-2.0, -2.0, -2.5, -3.0)], rel=1e-4)
    assert weights[1] == pytest.approx([math.exp(0.2), math.exp(-0.3), 2.0], rel=1e-4), "the last is cut at importance_cap"
    assert [answer["truncated"] > 0 for answer in record["groups"][2]["answers"]] == [False, False, True]
    for number in (0, 2):
        for answer in record["groups"][number]["answers"]:
            shift = -0.0 if answer["weight"] == 2.0 else math.log(answer["weight"])
            assert len(answer["token_ratio"]) == len(answer["token_weight"]) == answer["tokens"]
            assert answer["token_weight"] == pytest.approx([answer["weight"]] * answer["tokens"], rel=1e-2)
            if shift:
                assert answer["token_ratio"] == pytest.approx([math.exp(shift)] * answer["tokens"], rel=1e-2)
    assert record["groups"][0]["factor"] == 1.0
    bounded = [line for line in record["groups"] if "bounded" in line]
    assert bounded and all(line["factor"] == pytest.approx(EXTERNAL_WEIGHT * line["bounded"], rel=1e-4) for line in bounded)


def test_what_is_not_trained_on_is_written_with_the_reason(model: Path) -> None:
    trainer = learner(model, drop_truncated=True, drop_foreign_negatives=True)
    rng, tokenizer = random.Random(6), trainer.tokenizer
    groups = [
        scored_group(tokenizer, rng, finish_reason="length"),
        scored_group(tokenizer, rng, origin="external", rewards=(1.0, 0.0)),
        scored_group(tokenizer, rng, origin="external", rewards=(1.0, 0.0)),
        msgspec.structs.replace(scored_group(tokenizer, rng), rewards=[], failure="it hung"),
    ]
    batch = msgspec.structs.replace(batch_of(1, groups), places=Places(keep=1, node_cap=9))
    record = trainer.step(batch)
    lines = written(trainer, batch)["groups"]
    assert [line["id"] for line in lines] == [scored.group_id for scored in groups]
    without = lines[0]["answers"][0]
    assert without == {"place": 0, "left_out": "truncated", "advantage": pytest.approx(0.866, abs=1e-3)}
    assert [answer["place"] for answer in lines[0]["answers"]] == [0, 1, 2, 3]
    assert sorted(line["fate"] for line in lines[1:3]) == ["spare", "trained"]
    (kept,) = (line for line in lines[1:3] if line["fate"] == "trained")
    assert kept["answers"][1] == {"place": 1, "left_out": "negative", "advantage": -kept["answers"][0]["advantage"]}
    assert lines[3]["fate"] == "unscored" and record.skipped == {"unscored": 1}


def test_answers_that_the_policy_finds_absurd_are_written_as_such(model: Path) -> None:
    trainer = learner(model, policy_check_fraction=1.0, min_foreign_logprob=0.0)
    rng = random.Random(7)
    batch = batch_of(1, [scored_group(trainer.tokenizer, rng), scored_group(trainer.tokenizer, rng, origin="external")])
    assert trainer.step(batch).absurd_of == {"beta": 4}
    assert [line["fate"] for line in written(trainer, batch)["groups"]] == ["trained", "absurd"]


def test_clipped_tokens_are_those_of_the_metrics(model: Path) -> None:
    trainer = learner(model, learning_rate=0.05, updates_per_batch=3)
    rng = random.Random(8)
    batch = batch_of(1, [scored_group(trainer.tokenizer, rng), scored_group(trainer.tokenizer, rng)])
    record = trainer.step(batch)
    answers = [answer for line in written(trainer, batch)["groups"] for answer in line["answers"]]
    assert record.clip_fraction > 0.0
    assert sum(answer["clipped"] for answer in answers) == pytest.approx(record.clip_fraction * record.tokens, rel=1e-4)
    means = sum(answer["weight"] * answer["kept"] for answer in answers) / record.tokens
    assert means == pytest.approx(record.importance_weight, rel=1e-4)


def test_tokens_without_an_advantage_are_no_tokens_trained_on(model: Path) -> None:
    trainer = learner(model)
    rng = random.Random(9)
    groups = [scored_group(trainer.tokenizer, rng), scored_group(trainer.tokenizer, rng, rewards=(1.0, 1.0, 1.0))]
    batch = batch_of(1, groups)
    record = trainer.step(batch)
    lines = written(trainer, batch)["groups"]
    assert [line["fate"] for line in lines] == ["trained", "no_advantage"]
    assert record.tokens == sum(answer["tokens"] for answer in lines[0]["answers"])
    assert record.tokens == sum(completion.token_count for completion in groups[0].group.completions)
    without = trainer.step(batch_of(2, groups[1:]))
    assert (without.updated, without.tokens) == (False, 0)


def test_a_line_is_bounded_and_says_what_it_leaves_out() -> None:
    groups = [{"id": f"{number:064x}", "fate": "trained"} for number in range(40_000)]
    line = trained_line(7, 1.0, updated=True, updates=1, groups=groups)
    assert len(line) < MAX_LINE_BYTES + 1000
    record = json.loads(line)
    assert len(record["groups"]) + record["groups_not_written"] == len(groups) and line.startswith('{"step":7,')


def test_tokens_are_kept_one_by_one_for_the_first_answers_of_each_group_and_no_more() -> None:
    lengths = {0: [10, 10, 10], 2: [20, 5]}
    assert shown_places(lengths, 1000) == [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2)]
    assert shown_places(lengths, 40) == [(0, 0), (2, 0), (0, 1)]
    assert shown_places({0: [10_000]}) == [] and shown_places({}) == []

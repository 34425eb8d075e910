"""Groups that a batch has again are trained on as what an older policy said, and figures of new
local groups leave them out.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import torch
from prometheus_client import CollectorRegistry

from services.trainer.figures import TrainerGauges
from services.trainer.gradient.update import batch_logprobs
from services.trainer.learner import Learner
from services.trainer.selection.intake import take_in
from services.trainer.selection.likelihood import local_means
from shared.contracts.codec import decode, encode, pack_logprobs
from shared.contracts.messages import Batch, ScoredGroup
from shared.runtime import ServiceContext
from shared.runtime.status import StatusBoard
from tests.integration.trainer_life import batch_of, node_config, scored_group, tiny_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


def learner(model: Path, **trainer: Any) -> Learner:
    return Learner(node_config(model, model.parent, trainer={**trainer, "constants": {"policy_check_fraction": 0.0}}))


def local_group(of: Learner, seed: int, rewards: tuple[float, ...] = (1.0, 0.0, 0.0, 1.0), **changes: Any) -> ScoredGroup:
    return scored_group(of.tokenizer, random.Random(seed), rewards=rewards, **changes)


def with_replayed(batch: Batch, scored: ScoredGroup, staleness: int = 7) -> Batch:
    item = msgspec.structs.replace(batch.items[0], scored=scored, staleness=staleness, replayed=True, age_s=900.0)
    return decode(encode(msgspec.structs.replace(batch, items=[*batch.items, item])), Batch)


def logprobs_now(of: Learner, scored: ScoredGroup) -> list[list[float]]:
    """Of every token of a group under the policy as it is."""
    groups = take_in(batch_of(1, [scored]), of.rules).groups
    return [each.tolist() for each in batch_logprobs(of.model, groups, of.update_config)[0]]


def as_sampled_by(of: Learner, scored: ScoredGroup) -> ScoredGroup:
    """The group with the logprobs that the policy gives its tokens now, as a generator notes
    them.
    """
    completions = [
        msgspec.structs.replace(completion, behaviour_logprobs=pack_logprobs(logprobs))
        for completion, logprobs in zip(scored.group.completions, logprobs_now(of, scored), strict=True)
    ]
    return msgspec.structs.replace(scored, group=msgspec.structs.replace(scored.group, completions=completions))


@pytest.mark.slow
@pytest.mark.parametrize("cap", [2.0, 1.05])
def test_tokens_sampled_many_versions_ago_are_weighed_by_what_the_policy_of_then_gave_them(model: Path, cap: float) -> None:
    of = learner(model, importance_cap=cap)
    old = as_sampled_by(of, local_group(of, 0))
    then = logprobs_now(of, old)
    for number in range(1, 9):
        of.step(batch_of(number, [local_group(of, 10 * number), local_group(of, 10 * number + 1)]))
    fresh = as_sampled_by(of, local_group(of, 200))
    now, fresh_now = logprobs_now(of, old), logprobs_now(of, fresh)
    record = of.step(with_replayed(batch_of(9, [fresh]), old))
    ratios = [math.exp(a - b) for now_row, then_row in zip(now, then, strict=True) for a, b in zip(now_row, then_row, strict=True)]
    assert max(ratios) > 1.1 and min(ratios) < 0.9, "the policy has moved"
    tokens = len(ratios) + sum(map(len, fresh_now))
    expected = sum(min(cap, ratio) for ratio in ratios) + (tokens - len(ratios))
    assert record.importance_weight == pytest.approx(expected / tokens, rel=1e-4)
    assert record.truncated_fraction == pytest.approx(sum(ratio > cap for ratio in ratios) / tokens, rel=1e-6)
    kl = sum(ratio - math.log(ratio) - 1.0 for ratio in ratios) / tokens
    assert record.kl_behaviour == pytest.approx(kl, rel=1e-3)
    assert record.behaviour_share == 1.0 and record.updated


def test_a_replayed_group_changes_the_weights_as_the_same_local_group_would(model: Path) -> None:
    as_local, again = learner(model), learner(model)
    new, old = local_group(as_local, 1), local_group(as_local, 2)
    as_local.step(batch_of(1, [new, old]))
    again.step(with_replayed(batch_of(1, [new]), old))
    left, right = as_local.policy(), again.policy()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_rewards_groups_and_staleness_of_new_local_groups_leave_replayed_ones_out(model: Path) -> None:
    of = learner(model)
    new = [local_group(of, 1, rewards=(0.0, 0.5)), local_group(of, 2, rewards=(0.0, 0.0))]
    foreign = local_group(of, 3, rewards=(1.0, 0.0), origin="external")
    batch = with_replayed(batch_of(9, [*new, foreign]), local_group(of, 4, rewards=(1.0, 1.0, 1.0, 0.0)))
    record = of.step(batch)
    assert (record.groups_local, record.groups_external, record.groups_replayed, record.groups_skipped) == (2, 1, 1, 0)
    assert (record.reward_local, record.reward_external, record.reward_replayed) == (0.125, 0.5, 0.75)
    assert (record.staleness_mean, record.staleness_max, record.staleness_replayed) == (1.0, 1, 7.0)
    without = learner(model).step(batch_of(9, [*new, foreign]))
    assert (without.groups_replayed, without.reward_replayed, without.staleness_replayed) == (0, None, None)

    registry = CollectorRegistry()
    gauges = TrainerGauges(registry)
    board = StatusBoard("alpha", "trainer", "0")
    context = ServiceContext(
        config=node_config(model, model.parent),
        role="trainer",
        replica="0",
        node=None,  # type: ignore[arg-type]
        log=structlog.get_logger("test"),
        registry=registry,
        status=board,
        stopping=None,  # type: ignore[arg-type]
    )
    gauges.observe(record, context)
    assert registry.get_sample_value("swarm_trainer_groups_total", {"origin": "local"}) == 2.0
    assert registry.get_sample_value("swarm_trainer_reward", {"origin": "local"}) == 0.125
    assert registry.get_sample_value("swarm_trainer_staleness_steps_max") == 1.0
    assert (board.get("staleness_max"), board.get("reward_local")) == (1, 0.125)


def test_how_likely_foreign_text_must_be_is_told_by_new_local_answers_alone(model: Path) -> None:
    of = learner(model)
    batch = batch_of(3, [local_group(of, 1), local_group(of, 2)])
    replayed = take_in(with_replayed(batch, local_group(of, 3)), of.rules).groups
    assert [group.replayed for group in replayed] == [False, False, True]
    assert local_means(replayed) == local_means(take_in(batch, of.rules).groups)

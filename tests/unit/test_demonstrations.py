"""Demonstrations: right answers of the roster's nodes, of which a batch has a quarter at most, are
trained on as far as they are better than this node, and are not chosen by likelihood.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from services.sampler.assembly import BatchPlan
from services.trainer.learner import Learner
from services.trainer.selection.intake import take_in
from services.trainer.selection.likelihood import AbsurdTextRules, choose, groups_to_check
from shared.config.verifier_section import VerifierSection
from shared.contracts.codec import decode, encode
from shared.contracts.messages import Batch, Places, ScoredGroup
from tests.integration.trainer_life import batch_of, node_config, tiny_policy
from tests.integration.trainer_life import scored_group as with_tokens
from tests.unit.sampler_groups import scored_group
from tests.unit.sampler_history import History, limits, sampler


def shown(draw: int, node: str = "teacher", dataset: str = "chain_sum") -> ScoredGroup:
    right = scored_group(draw, node=node, origin="external", rewards=(1.0,), dataset=dataset)
    return msgspec.structs.replace(right, demonstration=True)


def history(**changes: object) -> History:
    chosen = sampler(**{"local": 4, "external": 4, **changes})
    return History(chosen, limits(chosen))


def test_a_batch_has_a_quarter_of_demonstrations_at_most_and_says_what_they_are_compared_with() -> None:
    made = history()
    for draw in range(8):
        made.publish(scored_group(draw, rewards=(0.0, 0.0, 1.0, 0.0)))
        made.publish(scored_group(draw, node="beta", origin="external"))
        made.publish(shown(draw))
    made.publish(shown(100, dataset="gcd"))  # nothing is known of this node's own answers to it
    plan = made.step()
    assert isinstance(plan, BatchPlan)
    (batch,) = made.batches
    rated = [(item.scored.group.node, item.pass_rate) for item in batch.items if item.pass_rate is not None]
    assert rated == [("teacher", pytest.approx(0.25))] * 2
    assert len(rated) <= len(batch.items) / 4 and len(batch.items) == 10
    assert [entry.dataset for entry in made.memory.external if entry.demonstration].count("gcd") == 1


def test_no_batch_waits_for_demonstrations_or_is_made_of_them_alone_and_a_crash_changes_none() -> None:
    made, other = history(shortage="short"), history(shortage="short")
    for each in (made, other):
        for draw in range(8):
            each.publish(shown(draw))
        each.read()
        each.now += 10.0
        assert not isinstance(each.decide(), BatchPlan)
        for draw in range(8):
            each.publish(scored_group(draw))
        each.read()
        each.now += 10.0
    assert isinstance(made.step(), BatchPlan)
    other.crash()
    other.decide()
    other.now += 10.0
    assert isinstance(other.step(), BatchPlan)
    assert [item.scored.group_id for item in made.batches[0].items] == [item.scored.group_id for item in other.batches[0].items]
    assert sum(item.pass_rate is not None for item in made.batches[0].items) == 1  # of four local groups and itself


def test_without_the_setting_a_group_of_right_answers_is_dropped() -> None:
    made = history()
    made.publish(msgspec.structs.replace(shown(0), demonstration=False))
    made.read()
    assert not len(made.memory.external) and made.memory.drops[("external", "without_advantage")] == 1


def test_only_a_roster_makes_demonstrations_possible() -> None:
    with pytest.raises(ValidationError, match="trust = roster"):
        VerifierSection(demonstrations=True)
    assert VerifierSection(demonstrations=True, trust="roster").demonstrations


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    model: Path = tiny_policy(tmp_path_factory.mktemp("model") / "tiny")
    return Learner(node_config(model, model.parent))


def batch_with(of: Learner, rewards: tuple[float, ...], pass_rate: float | None) -> Batch:
    """A local group, two candidates of which one is kept, and a demonstration."""
    chance = random.Random(7)
    groups = [with_tokens(of.tokenizer, chance), *(with_tokens(of.tokenizer, chance, origin="external") for _ in range(2))]
    right = with_tokens(of.tokenizer, chance, origin="external", same_tokenizer=False, rewards=rewards)
    batch = batch_of(1, [*groups, right])
    items = [*batch.items[:-1], msgspec.structs.replace(batch.items[-1], pass_rate=pass_rate)]
    whole = msgspec.structs.replace(batch, items=items, places=Places(keep=1, node_cap=9))
    return decode(encode(whole), Batch)


def test_its_advantage_is_the_reward_above_the_nodes_own_pass_rate_and_never_negative(learner: Learner) -> None:
    rewards, rate = (1.0, 0.5, 0.25), 0.375
    batch = batch_with(learner, rewards, rate)
    with_it = take_in(batch, learner.rules)
    without = take_in(msgspec.structs.replace(batch, items=batch.items[:3]), learner.rules)
    assert list(with_it.groups[3].advantages) == [0.625, 0.125, 0.0]
    assert [list(group.advantages) for group in with_it.groups[:3]] == [list(group.advantages) for group in without.groups]
    record = with_it.record()
    assert (record.groups_demonstrated, record.groups_external, record.reward_external) == (1, 2, without.record().reward_external)


def test_it_is_kept_however_unlikely_its_text_is(learner: Learner) -> None:
    batch = batch_with(learner, (1.0,), 0.5)
    demonstration = batch.items[-1].scored.group_id
    kept = choose(learner.model, batch, learner.rules, learner.update_config)
    assert demonstration in {item.scored.group_id for item in kept.batch.items} and len(kept.left_out) == 1
    everything = AbsurdTextRules(fraction=1.0, min_logprob=-0.001)
    taken = take_in(kept.batch, learner.rules)
    checked = {taken.authors[index][1] for index in groups_to_check(taken, learner.update_config, everything, 1)}
    assert len(checked) == 1 and demonstration not in checked
    record = learner.step(batch)
    assert record.updated and record.groups_demonstrated == 1

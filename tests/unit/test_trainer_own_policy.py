"""Foreign answers that the own policy finds absurd are not trained on; ordinary ones are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.trainer.intake import take_in
from services.trainer.learner import Learner
from services.trainer.own_policy import OwnPolicyRules, drop_absurd
from shared.config import load_config
from shared.messages import Batch, Completion, ModelIdentity, RolloutGroup, Sampling, ScoredGroup, Task, TaskRef, content_id, encode
from shared.tasks.derive import derive_task
from tests.integration.trainer_life import batch_of

DEMO = Path(__file__).parents[2] / "config" / "demo.toml"
BASE = Path(__file__).parents[2] / "models" / "base"
WORDS = ["gradient", "poison", "octopus", "therefore", "banana", "lorem", "ipsum", "dolor", "zebra", "quartz"]
FLOOR = -8.0


def learner(fraction: float = 1.0) -> Learner:
    overrides = {"model": {"path": str(BASE), "device": "cpu"}, "trainer": {"policy_check_fraction": fraction}}
    return Learner(load_config(DEMO, overrides=overrides))


@pytest.fixture(scope="module")
def policy() -> Learner:
    return learner()


def question(index: int) -> Task:
    spec = next(spec for spec in load_config(DEMO).tasks if spec.dataset == "gcd")
    return derive_task(TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=5, index=index))


def poisoned(answer: str, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=12)) + f" <answer>{answer}</answer>"


def answers(index: int, texts: list[str], rewards: list[float], node: str = "beta", origin: str = "external") -> ScoredGroup:
    group = RolloutGroup(
        node=node,
        created_at=1.0,
        draw=index,
        task=question(index),
        completions=[Completion(text=text, finish_reason="stop", token_count=1) for text in texts],
        model=ModelIdentity(name="other", tokenizer_hash="f" * 64),
        policy_version=0,
        sampling=Sampling(),
    )
    return ScoredGroup(
        group_id=content_id(encode(group)),
        origin=origin,  # type: ignore[arg-type]
        group=group,
        rewards=rewards,
        scored_by="alpha",
        score_seconds=0.0,
        scored_at=1.0,
    )


def swarm_batch(number: int = 1, origin: str = "external") -> Batch:
    """20 groups of beta with ordinary answers only, 20 of gamma whose right answer comes in absurd text."""
    rng = random.Random(0)
    ordinary, absurd = [], []
    for index in range(20):
        right = str(question(index).answer)
        ordinary.append(answers(index, [right, str(int(right) + 1)], [1.0, 0.0], "beta", origin))
        absurd.append(answers(index, [poisoned(right, rng), right], [1.0, 0.0], "gamma", origin))
    return batch_of(number, [*ordinary, *absurd])


def test_all_absurd_answers_are_dropped_and_no_ordinary_one_and_the_sender_is_named(policy: Learner) -> None:
    taken = take_in(swarm_batch(), policy.rules)
    kept, dropped = drop_absurd(
        policy.model, taken, policy.update_config, OwnPolicyRules(fraction=1.0, min_logprob=FLOOR), batch_seed=1
    )
    assert dropped == {"gamma": 20}
    assert kept.groups[:20] == taken.groups[:20]
    for before, after in zip(taken.groups[20:], kept.groups[20:], strict=True):
        assert after.completions == [before.completions[1]]
        assert after.advantages == [before.advantages[1]], "the baseline stays that of the whole group"
    assert kept.external == 40


def test_a_group_of_nothing_but_absurd_text_is_skipped_and_counted(policy: Learner) -> None:
    rng = random.Random(1)
    texts = [poisoned("1", rng), poisoned("2", rng)]
    taken = take_in(batch_of(1, [answers(0, texts, [1.0, 0.0]), answers(1, ["3", "4"], [1.0, 0.0])]), policy.rules)
    kept, dropped = drop_absurd(
        policy.model, taken, policy.update_config, OwnPolicyRules(fraction=1.0, min_logprob=FLOOR), batch_seed=1
    )
    assert (len(kept.groups), len(kept.authors), kept.external, dict(kept.skipped)) == (1, 1, 1, {"absurd": 1})
    assert dropped == {"beta": 2}


def test_own_groups_are_never_looked_at_and_fraction_zero_looks_at_none(policy: Learner) -> None:
    own = take_in(swarm_batch(origin="local"), policy.rules)
    rules = OwnPolicyRules(fraction=1.0, min_logprob=0.0)
    assert drop_absurd(policy.model, own, policy.update_config, rules, 1) == (own, {})
    foreign = take_in(swarm_batch(), policy.rules)
    off = OwnPolicyRules(fraction=0.0, min_logprob=0.0)
    assert drop_absurd(policy.model, foreign, policy.update_config, off, 1) == (foreign, {})


def test_the_fraction_is_kept_and_which_groups_are_looked_at_follows_from_the_batch(policy: Learner) -> None:
    taken = take_in(swarm_batch(), policy.rules)
    rules = OwnPolicyRules(fraction=0.5, min_logprob=0.0)  # nothing is that likely, so every group looked at is dropped
    looked = []
    for seed in (1, 1, 2, 3):
        kept, _ = drop_absurd(policy.model, taken, policy.update_config, rules, seed)
        looked.append(tuple(author for author in taken.authors if author not in set(kept.authors)))
    assert looked[0] == looked[1]
    assert len({looked[0], looked[2], looked[3]}) == 3
    assert all(10 <= len(each) <= 30 for each in looked)


def test_a_step_counts_them_and_two_learners_end_with_the_same_weights() -> None:
    first, second = learner(0.5), learner(0.5)
    record, again = first.step(swarm_batch()), second.step(swarm_batch())
    assert 1 <= record.answers_absurd == record.absurd_of["gamma"] <= 20
    assert record.absurd_of == again.absurd_of
    assert all(bool((tensor == second.policy()[name]).all()) for name, tensor in first.policy().items())
    assert learner(0.0).step(swarm_batch()).answers_absurd == 0

"""Foreign answers that this node's policy finds absurd are not trained on; ordinary ones are."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import pytest
import torch

from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import batch_logprobs
from services.trainer.learner import Learner
from services.trainer.selection.intake import take_in
from services.trainer.selection.likelihood import AbsurdTextRules, drop_absurd, least_logprob
from shared.config import load_config
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.messages import Batch, Completion, RolloutGroup, Sampling, ScoredGroup, Task, TaskRef
from shared.contracts.wire import ModelIdentity
from shared.model.prompts import render_prompt
from shared.tasks.derive import derive_task
from shared.tasks.evaluation import PASS_REWARD
from swarm_cli.installation import DEMO_CONFIG
from tests.constants import with_constants
from tests.integration.trainer_life import batch_of

BASE = Path(__file__).parents[2] / "models" / "base"
WORDS = ["gradient", "poison", "octopus", "therefore", "banana", "lorem", "ipsum", "dolor", "zebra", "quartz"]
FLOOR = -8.0


def learner(fraction: float = 1.0) -> Learner:
    overrides = {
        "model": {"path": str(BASE), "device": "cpu"},
        "trainer": {"constants": {"policy_check_fraction": fraction, "drop_foreign_negatives": False}},
    }
    # The absurd text is longer than what the demo lets in.
    return Learner(with_constants(load_config(DEMO_CONFIG, overrides=overrides), verifier={"max_foreign_length": 8.0}))


@pytest.fixture(scope="module")
def policy() -> Learner:
    return learner()


def question(index: int) -> Task:
    spec = next(spec for spec in load_config(DEMO_CONFIG).tasks if spec.dataset == "gcd")
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
        passed=[reward >= PASS_REWARD for reward in rewards],
        scored_by="alpha",
        score_seconds=0.0,
        scored_at=1.0,
    )


def swarm_batch(number: int = 1, origin: str = "external", count: int = 20) -> Batch:
    """`count` groups of beta with ordinary answers only, as many of gamma whose right answer comes
    in absurd text.
    """
    rng = random.Random(0)
    ordinary, absurd = [], []
    for index in range(count):
        right = str(question(index).answer)
        ordinary.append(answers(index, [right, str(int(right) + 1)], [1.0, 0.0], "beta", origin))
        absurd.append(answers(index, [poisoned(right, rng), right], [1.0, 0.0], "gamma", origin))
    return batch_of(number, [*ordinary, *absurd])


def test_all_absurd_answers_are_dropped_and_no_ordinary_one_and_the_sender_is_named(policy: Learner) -> None:
    taken = take_in(swarm_batch(), policy.rules)
    kept, dropped = drop_absurd(
        policy.model, taken, policy.update_config, AbsurdTextRules(fraction=1.0, min_logprob=FLOOR), batch_seed=1
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
        policy.model, taken, policy.update_config, AbsurdTextRules(fraction=1.0, min_logprob=FLOOR), batch_seed=1
    )
    assert [len(group.completions) for group in kept.groups] == [0, 2], "every group keeps its place"
    assert (kept.authors, kept.external, dict(kept.skipped)) == (taken.authors, 1, {"absurd": 1})
    assert dropped == {"beta": 2}


def test_local_groups_are_never_looked_at_and_fraction_zero_looks_at_none(policy: Learner) -> None:
    own = take_in(swarm_batch(origin="local"), policy.rules)
    rules = AbsurdTextRules(fraction=1.0, min_logprob=0.0)
    assert drop_absurd(policy.model, own, policy.update_config, rules, 1) == (own, {})
    foreign = take_in(swarm_batch(), policy.rules)
    off = AbsurdTextRules(fraction=0.0, min_logprob=0.0)
    assert drop_absurd(policy.model, foreign, policy.update_config, off, 1) == (foreign, {})


@pytest.mark.slow
def test_the_fraction_is_kept_and_which_groups_are_looked_at_follows_from_the_batch(policy: Learner) -> None:
    taken = take_in(swarm_batch(), policy.rules)
    rules = AbsurdTextRules(fraction=0.5, min_logprob=0.0)  # nothing is that likely, so every group looked at is dropped
    looked = []
    for seed in (1, 1, 2, 3):
        kept, _ = drop_absurd(policy.model, taken, policy.update_config, rules, seed)
        looked.append(tuple(sorted(kept.skipped_of)))
    assert looked[0] == looked[1]
    assert len({looked[0], looked[2], looked[3]}) == 3
    assert all(10 <= len(each) <= 30 for each in looked)


@pytest.mark.slow
def test_a_step_counts_them_and_two_learners_end_with_the_same_weights() -> None:
    first, second = learner(0.5), learner(0.5)
    record, again = first.step(swarm_batch(count=8)), second.step(swarm_batch(count=8))
    assert 1 <= record.answers_absurd == record.absurd_of["gamma"] <= 8
    assert record.absurd_of == again.absurd_of
    left, right = first.policy(), second.policy()
    assert left.keys() == right.keys() and all(bool((tensor == right[name]).all()) for name, tensor in left.items())
    assert learner(0.0).step(swarm_batch(count=8)).answers_absurd == 0


def test_the_bound_follows_the_local_answers_and_never_goes_below_the_absolute_one() -> None:
    rules = AbsurdTextRules(fraction=1.0, min_logprob=FLOOR, slack=2.0)
    assert least_logprob([-0.5, -1.5], rules) == pytest.approx(-3.0)
    assert least_logprob([-7.0], rules) == FLOOR
    assert least_logprob([], rules) == FLOOR, "nothing to compare with"
    assert least_logprob([math.nan, -1.0, -math.inf], rules) == pytest.approx(-3.0)
    assert least_logprob([-0.5], AbsurdTextRules(fraction=1.0, min_logprob=FLOOR)) == FLOOR


def sampled(policy: Learner, index: int, origin: str, node: str, seed: int, temperature: float = 1.0) -> ScoredGroup:
    """Eight answers that `policy` really samples, with its logprobs; the first counts as right."""
    task = question(index)
    prompt = render_prompt(policy.tokenizer, task.prompt, policy.rules.system_prompt)
    torch.manual_seed(seed)
    with torch.no_grad():
        ids = policy.model.generate(
            torch.tensor([prompt] * 8),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            max_new_tokens=24,
            pad_token_id=policy.rules.end_token_id,
            eos_token_id=policy.rules.end_token_id,
        )[:, len(prompt) :].tolist()
    end = policy.rules.end_token_id
    ids = [each[: each.index(end) + 1] if end in each else each for each in ids]
    group = TokenGroup(prompt_ids=prompt, completions=ids, behaviour_logprobs=[None] * 8, advantages=[1.0] * 8)
    logprobs = batch_logprobs(policy.model, [group], policy.update_config)[0]
    scored = answers(index, ["x"] * 8, [1.0] + [0.0] * 7, node, origin)
    completions = [
        Completion(
            text=policy.tokenizer.decode(each, skip_special_tokens=True),
            finish_reason="stop" if each[-1] == end else "length",
            token_count=len(each),
            token_ids=pack_ids(each),
            behaviour_logprobs=pack_logprobs(token_logprobs.tolist()),
        )
        for each, token_logprobs in zip(ids, logprobs, strict=True)
    ]
    model = ModelIdentity(name="same", tokenizer_hash=policy.rules.tokenizer_hash)
    return msgspec.structs.replace(scored, group=msgspec.structs.replace(scored.group, completions=completions, model=model))


@pytest.mark.slow
def test_by_default_no_answer_of_a_peer_is_left_out_and_every_right_answer_in_absurd_text_is() -> None:
    """Nothing is configured for the model: the bound comes from the batch's local answers."""
    room = {"max_new_tokens": 64}  # else the nonsense is left out for its length
    policy = Learner(load_config(DEMO_CONFIG, overrides={"model": {"path": str(BASE), "device": "cpu"}, "generator": room}))
    rng = random.Random(0)
    local = [sampled(policy, index, "local", "alpha", seed=index) for index in range(4)]
    peers = [sampled(policy, index, "external", "beta", seed=100 + index) for index in range(4, 16)]
    hostile = [
        answers(index, [poisoned(str(question(index).answer), rng), str(question(index).answer)], [1.0, 0.0], "gamma")
        for index in range(16, 28)
    ]
    record = policy.step(batch_of(1, [*local, *peers, *hostile]))
    assert record.absurd_of["gamma"] >= 12
    assert record.absurd_of.get("beta", 0) <= 2, "of 96 answers that the policy itself could have given"


def test_a_step_of_which_every_answer_is_absurd_ends_without_a_gradient() -> None:
    rng = random.Random(9)
    absurd = answers(2, [poisoned("5", rng), poisoned("6", rng)], [1.0, 0.0])
    record = learner().step(batch_of(1, [absurd]))
    assert not record.updated and record.answers_absurd == 2

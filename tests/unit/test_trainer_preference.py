"""Where the sampler leaves the choice to the trainer, the text's likelihood under its own policy
decides.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import batch_logprobs
from services.trainer.learner import Learner
from services.trainer.selection.intake import take_in
from services.trainer.selection.likelihood import (
    MASTERED,
    CandidateGroup,
    gives_already,
    is_new,
    prefer,
    preferred_indices,
    repeated_share,
    repeats_itself,
    text_logprob,
)
from shared.contracts.codec import decode, encode
from shared.contracts.messages import Batch, Preference
from tests.integration.trainer_life import batch_of, node_config, scored_group, tiny_policy

SENDERS = ("beta", "beta", "gamma", "gamma", "delta", "delta")


def new_learner(folder: Path, **trainer: Any) -> Learner:
    model = tiny_policy(folder / "tiny")
    return Learner(node_config(model, model.parent, trainer={"learning_rate": 1e-3, **trainer}))


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return new_learner(tmp_path_factory.mktemp("model"))


def candidates(learner: Learner, by: str | None, keep: int = 2, node_cap: int = 2) -> Batch:
    """One local group and six foreign ones of three nodes."""
    rng = random.Random(3)
    own = scored_group(learner.tokenizer, rng)
    foreign = []
    for index, sender in enumerate(SENDERS):
        made = scored_group(learner.tokenizer, rng, origin="external")
        group = replace(made.group, node=sender)
        foreign.append(replace(made, group=group, group_id=f"{index:064x}"))
    preference = None if by is None else Preference(keep=keep, by=by, node_cap=node_cap)  # type: ignore[arg-type]
    return replace(batch_of(1, [own, *foreign]), preference=preference)


def means(learner: Learner, batch: Batch) -> dict[str, float]:
    """Mean logprob per token of each foreign group, computed group by group."""
    found = {}
    for item in batch.items:
        if item.scored.origin == "external":
            taken = take_in(replace(batch, items=[item]), learner.rules)
            [group_logprobs] = batch_logprobs(learner.model, taken.groups, learner.update_config)
            found[item.scored.group_id] = float(torch.cat(group_logprobs).mean())
    return found


def rated(
    values: Sequence[float], nodes: Sequence[str], sources: Sequence[str] = (), barred: Container[int] = ()
) -> list[CandidateGroup]:
    """Candidates with these logprobs."""
    return [
        CandidateGroup(
            logprob=value,
            barred=index in barred,
            sender=node,
            source=sources[index] if sources else "gcd",
            lot=hash((index, node)),
        )
        for index, (value, node) in enumerate(zip(values, nodes, strict=True))
    ]


def external_ids(batch: Batch) -> list[str]:
    return [item.scored.group_id for item in batch.items if item.scored.origin == "external"]


@pytest.mark.parametrize("by", ["near", "far"])
def test_the_groups_nearest_to_the_policy_or_farthest_from_it_are_kept(learner: Learner, by: str) -> None:
    batch = candidates(learner, by, keep=3, node_cap=3)
    preferred = prefer(learner.model, batch, learner.rules, learner.update_config)
    of = means(learner, batch)
    assert len(set(of.values())) == 6
    expected = sorted(of, key=lambda group_id: of[group_id], reverse=by == "near")[:3]
    assert set(external_ids(preferred.batch)) == set(expected)
    assert preferred.left_out == 3
    assert preferred.logprob == pytest.approx(sum(of[group_id] for group_id in expected) / 3, abs=1e-5)
    left = [value for group_id, value in of.items() if group_id not in expected]
    assert preferred.logprob_left_out == pytest.approx(sum(left) / 3, abs=1e-5)
    assert preferred.batch.items[0] == batch.items[0], "local groups stay"


def test_a_step_trains_on_the_chosen_groups_as_if_no_other_had_come(tmp_path: Path) -> None:
    # Adam must not magnify rounding: the one checks the groups beforehand, the other in its pass.
    choosing, told = (new_learner(tmp_path, adam_eps=1e-3) for _ in range(2))
    batch = candidates(choosing, "near")
    chosen = prefer(choosing.model, batch, choosing.rules, choosing.update_config).batch
    record, expected = choosing.step(batch), told.step(replace(chosen, preference=None))
    assert (record.groups_external, record.groups_left_out) == (2, 4)
    assert record.logprob_external is not None and record.logprob_left_out is not None
    assert record.logprob_external > record.logprob_left_out
    assert (expected.groups_external, expected.groups_left_out, expected.logprob_external) == (2, 0, None)
    assert record.reward_external == expected.reward_external
    after = told.policy()
    assert all(torch.allclose(value, after[name], rtol=0.0, atol=1e-7) for name, value in choosing.policy().items())


@pytest.mark.parametrize("updates", [1, 2])
def test_no_text_is_scored_twice_under_the_same_weights(tmp_path: Path, updates: int) -> None:
    """Candidates are scored to be chosen. That serves the check of the chosen ones, and the first
    update gives the proximal policy of the second.
    """
    choosing = new_learner(tmp_path, updates_per_batch=updates)
    plain, positions = choosing.model.forward, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal positions
        positions += 0 if torch.is_grad_enabled() else named["input_ids"].numel()
        return plain(*arguments, **named)

    choosing.model.forward = counted
    batch = candidates(choosing, "near")
    items = [item for item in batch.items if item.scored.origin == "external"]
    batch_logprobs(choosing.model, take_in(replace(batch, items=items), choosing.rules).groups, choosing.update_config)
    needed, positions = positions, 0
    assert choosing.step(batch).groups_left_out == 4 and positions == needed


def test_without_a_preference_nothing_is_computed_and_nothing_left_out(learner: Learner) -> None:
    batch = candidates(learner, None)
    preferred = prefer(learner.model, batch, learner.rules, learner.update_config)
    assert preferred.batch is batch and preferred.left_out == 0 and preferred.logprob is None


def test_a_group_that_cannot_be_trained_on_comes_last(learner: Learner) -> None:
    batch = candidates(learner, "near", keep=5, node_cap=5)
    items = list(batch.items)
    of = means(learner, batch)
    likeliest = max(of, key=lambda group_id: of[group_id])
    at = next(index for index, item in enumerate(items) if item.scored.group_id == likeliest)
    items[at] = replace(items[at], scored=replace(items[at].scored, failure="the scorer was killed", rewards=[]))
    preferred = prefer(learner.model, replace(batch, items=items), learner.rules, learner.update_config)
    assert likeliest not in external_ids(preferred.batch) and len(external_ids(preferred.batch)) == 5


def test_a_batch_with_a_preference_survives_the_wire(learner: Learner) -> None:
    batch = candidates(learner, "far")
    assert decode(encode(batch), Batch) == batch


@given(
    st.lists(st.tuples(st.floats(-20, 0) | st.just(math.nan), st.integers(0, 3)), max_size=20),
    st.integers(0, 8),
    st.integers(1, 8),
    st.sampled_from(["near", "far"]),
)
def test_the_choice_keeps_the_cap_and_is_the_best_there_is(groups: list[tuple[float, int]], keep: int, cap: int, by: str) -> None:
    values, nodes = [value for value, _ in groups], [f"n{node}" for _, node in groups]
    chosen = preferred_indices(rated(values, nodes), Preference(keep=keep, by=by, node_cap=cap), 1)  # type: ignore[arg-type]
    assert chosen == sorted(set(chosen))
    per_node = {node: sum(nodes[index] == node for index in chosen) for node in nodes}
    assert all(count <= cap for count in per_node.values())
    assert len(chosen) == min(keep, sum(min(cap, nodes.count(node)) for node in set(nodes)))
    sign = 1 if by == "near" else -1
    for left in set(range(len(groups))) - set(chosen):
        rivals = [i for i in chosen if per_node[nodes[left]] < cap or nodes[i] == nodes[left]]
        assert math.isnan(values[left]) or all(sign * values[i] >= sign * values[left] for i in rivals)


@given(
    st.lists(st.tuples(st.floats(-20, 0), st.integers(0, 5)), max_size=20),
    st.integers(0, 8),
    st.integers(1, 8),
    st.integers(0, 4),
)
def test_newcomers_together_are_kept_up_to_their_part_and_the_others_have_the_rest(
    groups: list[tuple[float, int]], keep: int, cap: int, most: int
) -> None:
    values, nodes = [value for value, _ in groups], [f"n{node}" for _, node in groups]
    new = ["n0", "n1", "n2"]
    preference = Preference(keep=keep, by="near", node_cap=cap, newcomers=new, newcomers_most=most)
    chosen = [nodes[index] for index in preferred_indices(rated(values, nodes), preference, 1)]
    capped = {node: min(cap, nodes.count(node)) for node in set(nodes)}
    old = sum(count for node, count in capped.items() if node not in new)
    assert sum(node in new for node in chosen) <= most
    assert len(chosen) == min(keep, old + min(most, sum(count for node, count in capped.items() if node in new)))


def test_what_the_policy_gives_already_takes_no_place_even_where_nothing_else_is_left() -> None:
    values, nodes = [-0.1, -0.1, -0.1, -2.0], ["mallory", "mallory", "mallory", "beta"]
    preference = Preference(keep=3, by="near", node_cap=3, by_lot=1)
    assert preferred_indices(rated(values, nodes, barred={0, 1, 2}), preference, 1) == [3]


def test_one_source_has_no_more_than_its_cap_while_others_have_enough() -> None:
    values, nodes = [-0.1, -0.1, -0.1, -0.1, -2.0, -3.0], ["a", "b", "c", "d", "e", "f"]
    sources = ["gcd", "gcd", "gcd", "gcd", "lcm", "bf"]
    assert preferred_indices(rated(values, nodes, sources), Preference(keep=4, by="near", node_cap=4, source_cap=2), 1) == [
        0,
        1,
        4,
        5,
    ]
    alone = ["gcd"] * 6
    assert len(preferred_indices(rated(values, nodes, alone), Preference(keep=4, by="near", node_cap=4, source_cap=2), 1)) == 4


def test_places_by_lot_go_to_another_sender_each_however_many_likely_groups_one_has() -> None:
    values, nodes = [-0.1] * 12 + [-3.0] * 3, ["mallory"] * 12 + ["beta", "gamma", "delta"]
    places = Counter[str]()
    for seed in range(400):
        preference = Preference(keep=3, by="near", node_cap=3, by_lot=2)
        chosen = preferred_indices(rated(values, nodes), preference, seed)
        places.update({nodes[index] for index in chosen})
        assert len({nodes[index] for index in chosen} - {"mallory"}) >= 1
    assert all(140 < places[node] < 260 for node in ("beta", "gamma", "delta")), places


def group_of(*answers: Sequence[int], prompt: Sequence[int] = (1, 2, 3)) -> TokenGroup:
    """A group of right answers."""
    return TokenGroup(
        prompt_ids=prompt,
        completions=answers,
        behaviour_logprobs=[None] * len(answers),
        advantages=[1.0] * len(answers),
        is_local=False,
    )


def test_text_that_was_said_before_does_not_make_an_answer_likelier() -> None:
    said = [5, 6, 7, 8, 9]
    assert is_new([1, 2, 3], said).tolist() == [True] * 5
    assert is_new([1, 2, 3], [*said, *said]).tolist() == [True] * 7 + [False] * 3
    assert is_new([*said], said).tolist() == [True] * 2 + [False] * 3
    assert is_new([1], [1]).tolist() == [True]
    once, often = group_of(said), group_of(said * 6)
    unlikely, sure = [-4.0] * 5, [-0.01] * 25
    assert text_logprob(once, [torch.tensor(unlikely)]) == pytest.approx(-4.0)
    repeated = text_logprob(often, [torch.tensor([*unlikely, *sure])])
    assert repeated < -2.8, "only the two tokens at a seam count besides what was said first"
    assert sum([*unlikely, *sure]) / 30 > -0.7, "the mean that it replaces"


def test_a_long_text_that_says_the_same_again_repeats_itself_unless_local_answers_do() -> None:
    assert repeats_itself(group_of([5, 6, 7, 8, 9, 4] * 9), usual=0.0)
    assert not repeats_itself(group_of([5, 6, 7, 8, 9, 4] * 9), usual=0.6)
    assert not repeats_itself(group_of([0] * 16), usual=0.0), "a small matrix of zeros"
    assert not repeats_itself(group_of(list(range(10, 200))), usual=0.0)
    assert repeated_share([group_of([5, 6, 7, 8, 9, 5, 6, 7, 8, 9])]) == pytest.approx(0.3)
    assert repeated_share([]) == 0.0


def test_a_group_is_mastered_by_the_probability_of_its_different_right_answers_together() -> None:
    half, third = [math.log(0.51)], [math.log(0.3)]
    assert MASTERED == 0.5
    assert gives_already(group_of([7]), [torch.tensor(half)])
    assert not gives_already(group_of([7], [7]), [torch.tensor(third), torch.tensor(third)])
    assert gives_already(group_of([7], [8]), [torch.tensor(third), torch.tensor(third)])
    assert not gives_already(group_of([7, 8, 9]), [torch.tensor([-0.3, -0.3, -0.3])])

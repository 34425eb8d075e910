"""The trainer fills the places of foreign groups, in the order of the draw, with what teaches its
policy something.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import batch_logprobs
from services.trainer.learner import Learner
from services.trainer.selection import likelihood
from services.trainer.selection.intake import take_in
from services.trainer.selection.likelihood import (
    MASTERED,
    Chosen,
    choose,
    filled_places,
    gives_already,
    is_new,
    repeated_share,
    repeats_itself,
    rewarded_short,
)
from shared.contracts.codec import decode, encode
from shared.contracts.messages import Batch, Places, ScoredGroup
from tests.integration.trainer_life import batch_of, node_config, scored_group, tiny_policy
from tests.unit.sampler_groups import scored_group as sampler_group

SENDERS = ("beta", "beta", "gamma", "gamma", "delta", "delta")


def new_learner(folder: Path, **trainer: Any) -> Learner:
    model = tiny_policy(folder / "tiny")
    return Learner(node_config(model, model.parent, trainer={"learning_rate": 1e-3, **trainer}))


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return new_learner(tmp_path_factory.mktemp("model"))


def candidates(learner: Learner, keep: int = 2, node_cap: int = 2) -> Batch:
    """One local group and six foreign ones of three nodes."""
    rng = random.Random(3)
    own = scored_group(learner.tokenizer, rng)
    foreign = []
    for index, sender in enumerate(SENDERS):
        made = scored_group(learner.tokenizer, rng, origin="external")
        group = replace(made.group, node=sender)
        foreign.append(replace(made, group=group, group_id=f"{index:064x}"))
    return replace(batch_of(1, [own, *foreign]), places=Places(keep=keep, node_cap=node_cap))


def external_ids(batch: Batch) -> list[int]:
    return [int(item.scored.group_id, 16) for item in batch.items if item.scored.origin == "external"]


def chosen_by(learner: Learner, batch: Batch) -> Chosen:
    return choose(learner.model, batch, learner.rules, learner.update_config)


def test_places_are_filled_in_the_order_of_the_draw(learner: Learner) -> None:
    batch = candidates(learner, keep=3)
    chosen = chosen_by(learner, batch)
    assert external_ids(chosen.batch) == [0, 1, 2]
    assert chosen.left_out == {f"{index:064x}": "spare" for index in (3, 4, 5)}
    assert chosen.batch.items[0] == batch.items[0], "local groups stay"
    assert external_ids(chosen_by(learner, candidates(learner, keep=3, node_cap=1)).batch) == [0, 2, 4]


def test_what_the_policy_gives_already_leaves_its_place_to_the_next(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = candidates(learner, keep=2)
    monkeypatch.setattr(likelihood, "MASTERED", 0.0)
    nothing = chosen_by(learner, batch)
    assert external_ids(nothing.batch) == [] and set(nothing.left_out.values()) == {"mastered"}
    assert nothing.mastered_of == {"beta": 2, "gamma": 2, "delta": 2}
    likeliest = {}
    for item in batch.items[1:]:
        group = rewarded_short(take_in(replace(batch, items=[item]), learner.rules).groups[0])
        [of_group] = batch_logprobs(learner.model, [group], learner.update_config)
        likeliest[int(item.scored.group_id, 16)] = sum(math.exp(float(each.sum())) for each in of_group)
    order = sorted(likeliest, key=lambda index: -likeliest[index])
    monkeypatch.setattr(likelihood, "MASTERED", (likeliest[order[0]] + likeliest[order[1]]) / 2)
    chosen = chosen_by(learner, replace(batch, places=Places(keep=5, node_cap=2)))
    assert sorted(external_ids(chosen.batch)) == sorted(order[1:])
    assert chosen.left_out == {f"{order[0]:064x}": "mastered"}


def test_a_step_trains_on_the_chosen_groups_as_if_no_other_had_come(tmp_path: Path) -> None:
    # Adam must not magnify rounding: the one checks the groups beforehand, the other in its pass.
    likely = {"foreign_logprob_slack": 50.0, "min_foreign_logprob": -50.0, "adam_eps": 1e-3}
    choosing, told = (new_learner(tmp_path, constants=likely) for _ in range(2))
    batch = candidates(choosing)
    chosen = chosen_by(choosing, batch).batch
    record, expected = choosing.step(batch), told.step(replace(chosen, places=None))
    assert (record.groups_external, record.groups_left_out) == (2, 4)
    assert (expected.groups_external, expected.groups_left_out) == (2, 0)
    assert record.reward_external == expected.reward_external
    after = told.policy()
    assert all(torch.allclose(value, after[name], rtol=0.0, atol=1e-7) for name, value in choosing.policy().items())


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("short", [True, False])
def test_only_short_rewarded_answers_of_chosen_groups_are_computed_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int, short: bool
) -> None:
    choosing = new_learner(tmp_path, updates_per_batch=updates)
    if not short:
        monkeypatch.setattr(likelihood, "SHORT", 1)
    plain, positions = choosing.model.forward, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal positions
        positions += 0 if torch.is_grad_enabled() else named["input_ids"].numel()
        return plain(*arguments, **named)

    choosing.model.forward = counted
    batch = candidates(choosing)
    groups = take_in(replace(batch, items=batch.items[1:3]), choosing.rules).groups
    batch_logprobs(choosing.model, [rewarded_short(group) for group in groups], choosing.update_config)
    needed, positions = positions, 0
    assert choosing.step(batch).groups_left_out == 4 and positions == needed and bool(needed) == short


def test_without_places_nothing_is_computed_and_nothing_left_out(learner: Learner) -> None:
    batch = replace(candidates(learner), places=None)
    chosen = chosen_by(learner, batch)
    assert chosen.batch is batch and not chosen.left_out


def test_a_group_that_cannot_be_trained_on_comes_last(learner: Learner) -> None:
    batch = candidates(learner, keep=5, node_cap=5)
    items = list(batch.items)
    items[1] = replace(items[1], scored=replace(items[1].scored, failure="the scorer was killed", rewards=[]))
    assert external_ids(chosen_by(learner, replace(batch, items=items)).batch) == [1, 2, 3, 4, 5]


def test_a_batch_with_places_survives_the_wire_and_one_of_an_earlier_version_is_read(learner: Learner) -> None:
    batch = candidates(learner)
    assert decode(encode(batch), Batch) == batch
    fields = msgpack.unpackb(encode(batch))
    fields["preference"] |= {"by": "near", "by_lot": 1}
    assert decode(msgpack.packb(fields), Batch) == batch


def from_nodes(nodes: Sequence[str], sources: Sequence[str] = ()) -> list[ScoredGroup]:
    """Candidates of these nodes, and of these task sources."""
    return [
        sampler_group(index, node=node, origin="external", dataset=sources[index] if sources else "gcd")
        for index, node in enumerate(nodes)
    ]


def placed(found: Sequence[ScoredGroup], places: Places) -> list[int]:
    return sorted(found.index(scored) for scored in filled_places(found, places))


@given(
    st.lists(st.integers(0, 5), max_size=20),
    st.integers(0, 8),
    st.integers(1, 8),
    st.integers(0, 4),
)
def test_caps_of_senders_and_of_all_newcomers_hold_and_the_others_have_the_rest(
    senders: list[int], keep: int, cap: int, most: int
) -> None:
    nodes, new = [f"n{sender}" for sender in senders], ["n0", "n1", "n2"]
    places = Places(keep=keep, node_cap=cap, newcomers=new, newcomers_most=most)
    chosen = Counter(nodes[index] for index in placed(from_nodes(nodes), places))
    assert all(count <= cap for count in chosen.values())
    capped = {node: min(cap, nodes.count(node)) for node in set(nodes)}
    old = sum(count for node, count in capped.items() if node not in new)
    assert sum(chosen[node] for node in new) <= most
    assert chosen.total() == min(keep, old + min(most, sum(count for node, count in capped.items() if node in new)))


def test_one_source_has_no_more_than_its_cap_while_others_have_enough() -> None:
    nodes, places = ["a", "b", "c", "d", "e", "f"], Places(keep=4, node_cap=4, source_cap=2)
    assert placed(from_nodes(nodes, ["gcd", "gcd", "gcd", "gcd", "lcm", "bf"]), places) == [0, 1, 4, 5]
    assert len(placed(from_nodes(nodes, ["gcd"] * 6), places)) == 4


def group_of(*answers: Sequence[int], prompt: Sequence[int] = (1, 2, 3)) -> TokenGroup:
    """A group of right answers."""
    return TokenGroup(
        prompt_ids=prompt,
        completions=answers,
        behaviour_logprobs=[None] * len(answers),
        advantages=[1.0] * len(answers),
        is_local=False,
    )


def test_a_token_is_new_unless_it_ends_three_that_were_said_before() -> None:
    said = [5, 6, 7, 8, 9]
    assert is_new([1, 2, 3], said).tolist() == [True] * 5
    assert is_new([1, 2, 3], [*said, *said]).tolist() == [True] * 7 + [False] * 3
    assert is_new([*said], said).tolist() == [True] * 2 + [False] * 3
    assert is_new([1], [1]).tolist() == [True]


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

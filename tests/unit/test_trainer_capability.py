"""What an author's text is worth: worked out by hand, within its bounds for any history, and the
same after a restart.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.checkpoint import OPTIMIZER
from services.trainer.learner import Learner
from services.trainer.selection.intake import (
    LEAST_GROUPS,
    CapabilityRules,
    Window,
    after_batch,
    capability_factors,
    newest,
    take_in,
)
from services.trainer.torchrun import pack_state, unpack_state
from shared.contracts.messages import Batch, ScoredGroup
from tests.integration.trainer_life import batch_of, node_config, same_policy, scored_group, through_a_file, tiny_policy

FIVE = CapabilityRules(window_batches=5)
SOURCE = "chain_sum {}"


def test_the_factor_is_the_ratio_of_mean_pass_rates_on_the_sources_that_both_have() -> None:
    window: Window = [
        [(None, "easy", 0.75), (None, "hard", 0.25), ("beta", "hard", 0.5), ("beta", "hard", 0.75), ("gamma", "easy", 0.375)],
        [(None, "easy", 0.5), (None, "hard", 0.125), ("beta", "hard", 0.25), ("beta", "easy", 0.75), ("gamma", "easy", 0.25)],
        [(None, "unshared", 0.125), ("beta", "never tried here", 0.125), ("gamma", "easy", 0.375), ("gamma", "easy", 0.25)],
    ]
    # Own means: easy 5/8, hard 3/16. beta: 9/4 over three of hard and one of easy, against 3 x 3/16
    # + 5/8.
    beta = Fraction(9, 4) / (3 * Fraction(3, 16) + Fraction(5, 8))
    # gamma: 5/4 over four of easy, against 4 x 5/8; but of this node's groups of easy there are
    # two.
    assert capability_factors(window, FIVE) == {"beta": float(beta)} == {"beta": pytest.approx(1.8947368)}
    more = [*window, [(None, "easy", 0.75), (None, "easy", 0.5)]]
    assert capability_factors(more, FIVE)["gamma"] == 0.5


def test_easy_tasks_make_nobody_able() -> None:
    own: list[Any] = [(None, "easy", 0.75), (None, "hard", 0.25)] * 4
    same = [("beta", "easy", 0.75)] * 6
    assert capability_factors([[*own, *same]], FIVE) == {"beta": 1.0}


def test_who_is_not_known_well_enough_has_no_factor() -> None:
    own: list[Any] = [(None, SOURCE, 0.25)] * LEAST_GROUPS
    theirs: list[Any] = [("beta", SOURCE, 0.5)] * LEAST_GROUPS
    assert capability_factors([own, theirs], FIVE) == {"beta": 2.0}
    assert capability_factors([own, theirs[1:]], FIVE) == {}
    assert capability_factors([own[1:], theirs], FIVE) == {}
    assert capability_factors([], FIVE) == {}


@pytest.mark.parametrize(("theirs", "ours", "factor"), [(0.125, 0.875, 0.5), (0.875, 0.125, 3.0), (0.5, 0.25, 2.0)])
def test_a_factor_stays_within_its_bounds(theirs: float, ours: float, factor: float) -> None:
    window: Window = [[(None, SOURCE, ours), ("beta", SOURCE, theirs)] * 4]
    assert capability_factors(window, CapabilityRules(window_batches=5, low=0.5, high=3.0)) == {"beta": factor}


seen = st.tuples(
    st.sampled_from([None, "beta", "gamma"]),
    st.sampled_from(["easy", "hard", "rare"]),
    st.integers(1, 7).map(lambda passes: passes / 8),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(seen, max_size=12), max_size=8), st.floats(0.01, 1.0), st.floats(1.0, 100.0))
def test_factors_are_what_exact_arithmetic_says_for_any_history(window: Window, low: float, high: float) -> None:
    factors = capability_factors(window, CapabilityRules(window_batches=8, low=low, high=high))
    everything = [each for batch in window for each in batch]
    assert set(factors) <= {"beta", "gamma"}
    for author in ("beta", "gamma"):
        own = {s: [Fraction(p) for a, s, p in everything if a is None and s == s_] for _, s_, _ in everything for s in [s_]}
        theirs = [(s, Fraction(p)) for a, s, p in everything if a == author and own[s]]
        known_of_own = sum(len(own[s]) for s in {s for s, _ in theirs})
        assert (author in factors) == (len(theirs) >= 4 and known_of_own >= 4)
        if author in factors:
            ratio = sum(p for _, p in theirs) / sum(sum(own[s]) / len(own[s]) for s, _ in theirs)
            assert factors[author] == pytest.approx(min(max(float(ratio), low), high), rel=1e-12)


@pytest.mark.parametrize("wrong", [{"window_batches": -1}, {"low": 0.0}, {"low": 1.5}, {"high": 0.5}, {"high": math.inf}])
def test_rules_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it must be|need 0 < low"):
        CapabilityRules(**wrong)


# From the message to the step.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


def learner(model: Path, **trainer: Any) -> Learner:
    return Learner(node_config(model, model.parent, trainer={**trainer, "constants": {"policy_check_fraction": 0.0}}))


def group(of: Learner, seed: int, passes: int, origin: str = "external", completions: int = 4, **changes: Any) -> ScoredGroup:
    rewards = [1.0] * passes + [0.5] * (completions - passes)  # partial credit is no pass
    made = scored_group(of.tokenizer, random.Random(seed), rewards=rewards, origin=origin)
    return msgspec.structs.replace(made, **changes)


def lesson(of: Learner, number: int) -> Batch:
    """Of beta's groups three answers in four pass, of this node's one in four, and some of either
    say nothing.
    """
    at = 10 * number
    return batch_of(
        number,
        [
            group(of, at, 1, "local"),
            group(of, at + 1, 0, "local"),
            group(of, at + 2, 4, "local"),
            group(of, at + 3, 3),
            group(of, at + 4, 0),
        ],
    )


def test_a_window_holds_the_newest_batches_and_of_them_the_groups_that_can_be_compared(model: Path) -> None:
    of = learner(model)
    window: Window = []
    for number in range(1, 8):
        window = after_batch(window, lesson(of, number), FIVE)
    assert window == [[(None, SOURCE, 0.25), ("beta", SOURCE, 0.75)]] * 5
    assert newest(window, replace(FIVE, window_batches=2)) == window[3:]
    assert newest(window, CapabilityRules()) == [] == after_batch(window, lesson(of, 8), CapabilityRules())
    shared = batch_of(
        1, [group(of, 1, 2, share="copiers"), group(of, 2, 2, failure="timed out"), group(of, 3, 2, rewards=[1.0, 0.0])]
    )
    assert after_batch([], shared, FIVE) == [[("copiers", SOURCE, 0.5)]]


def test_foreign_advantages_are_multiplied_before_they_are_bounded_and_local_ones_never(model: Path) -> None:
    of = learner(model, foreign_capability_window=5, max_foreign_advantage=2.0, drop_foreign_negatives=False)
    earlier: Window = [[(None, SOURCE, 0.25), ("beta", SOURCE, 0.5)]] * LEAST_GROUPS
    batch = batch_of(1, [group(of, 1, 1, "local"), group(of, 2, 1), group(of, 3, 1, share="somebody else")])
    plain, doubled = take_in(batch, of.rules), take_in(batch, of.rules, earlier)
    assert [each.advantages for each in plain.groups] == [pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-3)] * 3
    assert doubled.groups[0] == plain.groups[0] and doubled.groups[2] == plain.groups[2]
    assert doubled.groups[1].advantages == pytest.approx([2.0, -1.0, -1.0, -1.0], rel=1e-3)
    assert (plain.capability_of, doubled.capability_of) == ({}, {"beta": 2.0})


def test_the_first_batches_and_a_batchs_own_rewards_have_no_say(model: Path) -> None:
    of = learner(model, foreign_capability_window=5)
    factors = [of.step(lesson(of, number)).capability_of for number in range(1, 7)]
    assert factors == [{}] * LEAST_GROUPS + [{"beta": 3.0}] * 2
    assert of.step(batch_of(7, [group(of, 99, 1)])).capability_of == {"beta": 3.0}
    # Six batches are more than the window: what beta passed last is now in it.
    assert of.step(lesson(of, 8)).capability_of == {"beta": pytest.approx((4 * 0.75 + 0.25) / 5 / 0.25)}


@pytest.mark.slow
def test_off_is_bit_for_bit_as_if_it_were_not_there(model: Path) -> None:
    plain, window_of_none = learner(model), learner(model, foreign_capability_bounds=[0.5, 2.0])
    for number in range(1, 7):
        assert plain.step(lesson(plain, number)).capability_of == {}
        window_of_none.step(lesson(plain, number))
    assert plain.state().earlier_groups == []
    assert same_policy(plain, window_of_none)


@pytest.mark.slow
def test_a_resumed_learner_weighs_authors_as_the_one_before_it_bit_for_bit(model: Path, tmp_path: Path) -> None:
    settings = {"foreign_capability_window": 5}
    whole, first = learner(model, **settings), learner(model, **settings)
    for number in range(1, 9):
        whole.step(lesson(whole, number))
        if number <= 5:
            first.step(lesson(first, number))
    saved = through_a_file(first.state(), tmp_path)
    assert saved.earlier_groups == first.state().earlier_groups != []
    second, forgetful = learner(model, **settings), learner(model, **settings)
    second.restore(saved)
    forgetful.restore(replace(through_a_file(first.state(), tmp_path), earlier_groups=[]))
    for number in range(6, 9):
        assert second.step(lesson(second, number)).capability_of == {"beta": 3.0}
        forgetful.step(lesson(forgetful, number))
    assert same_policy(whole, second) and second.state().earlier_groups == whole.state().earlier_groups
    assert not same_policy(whole, forgetful), "without what was saved the resumed run would be another one"
    narrower = learner(model, foreign_capability_window=2)
    narrower.restore(saved)
    assert narrower.state().earlier_groups == saved.earlier_groups[-2:]
    assert unpack_state(pack_state(saved)).earlier_groups == saved.earlier_groups, "all processes of a trainer know the same"


def test_a_checkpoint_of_an_older_version_starts_with_nothing_known(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wrote it is gone, so today's code is made to leave out what it did not write."""
    write = torch.save

    def as_before(value: dict[str, Any], file: Any) -> None:
        write({name: part for name, part in value.items() if name != "earlier_groups"}, file)

    monkeypatch.setattr(torch, "save", as_before)
    of = learner(model, foreign_capability_window=5)
    of.step(lesson(of, 1))
    assert of.state().earlier_groups and through_a_file(of.state(), tmp_path).earlier_groups == []
    assert (tmp_path / "step-00000002" / OPTIMIZER).is_file()

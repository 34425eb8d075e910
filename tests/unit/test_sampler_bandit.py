"""The mixture credits what was in force, forgets, explores, and ends up with what helps."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.sampler import bandit
from services.sampler.bandit import Evaluation
from shared.contracts.codec import decode, encode
from shared.contracts.sampler_state import BanditState

ARMS = ("uniform", "learnability", "spread")


def seen(version: int, rate: float) -> Evaluation:
    return Evaluation(version=version, pass_rate=rate, n=200)


def arm(state: BanditState, name: str) -> tuple[float, float]:
    [found] = [each for each in state.arms if each.strategy == name]
    return found.windows, found.gain


def test_the_first_arm_follows_from_the_seed_and_stays_until_a_result_is_known() -> None:
    first = bandit.start(ARMS, "7/alpha")
    assert bandit.start(ARMS, "7/alpha") == first
    assert {bandit.in_force(bandit.start(ARMS, f"{seed}/alpha")) for seed in range(30)} == set(ARMS)
    later = first
    for number in range(1, 20):
        later = bandit.after_batch(later, number, None, "7/alpha")
    assert later == first


def test_a_gain_is_credited_to_the_arms_by_their_share_of_the_batches_in_between() -> None:
    state = bandit.start(("uniform",), "s")
    state = bandit.reconciled(state, ("uniform", "spread"), 1, "s")
    state = bandit.after_batch(state, 1, seen(0, 0.10), "s")  # the base policy's result comes while batch 2 is next
    first, second = state.runs[0].strategy, bandit.in_force(state)
    for number in range(2, 12):
        state = bandit.after_batch(state, number, None, "s")
    state = bandit.after_batch(state, 12, seen(10, 0.20), "s")
    credit = Counter({first: 0.1})
    credit[second] += 0.9  # type: ignore[assignment]
    assert sum(windows for windows, _ in (arm(state, "uniform"), arm(state, "spread"))) == pytest.approx(1.0)
    for name, share in credit.items():
        # One gain is its own root mean square: 1 in units of it.
        assert arm(state, name) == (pytest.approx(share), pytest.approx(share))
    assert (state.version, state.pass_rate) == (10, 0.2)


def test_old_windows_count_less_and_a_result_counts_once() -> None:
    state = bandit.after_batch(bandit.start(("uniform",), "s"), 1, seen(0, 0.1), "s")
    state = bandit.after_batch(state, 5, seen(4, 0.2), "s")
    again = bandit.after_batch(state, 6, seen(4, 0.2), "s")
    assert again == state
    older = bandit.after_batch(state, 6, seen(3, 0.9), "s")
    assert older == state
    state = bandit.after_batch(state, 9, seen(8, 0.2), "s")
    assert arm(state, "uniform") == (pytest.approx(1.9), pytest.approx(0.9))


def test_batches_without_foreign_groups_are_nobodys_merit() -> None:
    state = bandit.after_batch(bandit.start(("uniform",), "s"), 1, seen(0, 0.1), "s")
    for number in range(2, 12):
        state = bandit.after_batch(state, number, None, "s", shared=number < 7)
    assert len(state.runs) == 3 and bandit.in_force(state) == "uniform"
    state = bandit.after_batch(state, 12, seen(11, 0.2), "s")
    assert arm(state, "uniform")[0] == pytest.approx(6 / 11), "batches 1 to 6 of 1 to 11"


def test_other_arms_in_the_configuration_keep_what_is_known_of_the_old_ones() -> None:
    state = bandit.after_batch(bandit.start(("uniform",), "s"), 1, seen(0, 0.1), "s")
    state = bandit.after_batch(state, 5, seen(4, 0.2), "s")
    wider = bandit.reconciled(state, ("spread", "uniform"), 6, "s")
    assert arm(wider, "uniform") == arm(state, "uniform") and bandit.in_force(wider) == "uniform"
    other = bandit.reconciled(state, ("spread", "balanced"), 6, "s")
    assert bandit.in_force(other) in {"spread", "balanced"}
    assert other.runs[-1].first_batch == 6 and other.runs[0].strategy == "uniform"


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_the_arm_that_helps_is_found_whatever_the_gains_are_measured_in(scale: float) -> None:
    gain = {"uniform": 0.1, "learnability": 0.5, "spread": -0.2}
    used: Counter[str] = Counter()
    for seed in range(12):
        rng, rate, number = random.Random(seed), 0.0, 1
        state = bandit.after_batch(bandit.start(ARMS, str(seed)), number, seen(0, 0.0), str(seed))
        for window in range(1, 61):
            strategy = bandit.in_force(state)
            used[strategy] += window > 30
            rate += scale * rng.gauss(gain[strategy], 0.3) / 100
            number += 10
            # A pass rate outside of [0, 1] is no rate, yet only its differences matter here.
            state = bandit.after_batch(state, number, seen(10 * window, rate), str(seed))
    assert used["learnability"] > 0.6 * used.total(), used
    assert all(used[name] > 0 for name in ARMS), "what helps may change, so all are tried now and then"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.booleans(), st.booleans()), max_size=60), st.integers(0, 5))
def test_the_state_travels_and_stays_small_whatever_happens(steps: list[tuple[int, float, bool, bool]], seed: int) -> None:
    state, version, name = bandit.start(ARMS, str(seed)), 0, str(seed)
    for number, (newer, rate, known, shared) in enumerate(steps, start=1):
        version = min(version + newer, number)
        state = bandit.after_batch(state, number, seen(version, rate) if known else None, name, shared=shared)
        assert decode(encode(state), BanditState) == state
        assert bandit.in_force(state) in ARMS
        firsts = [run.first_batch for run in state.runs]
        assert firsts == sorted(set(firsts)) and firsts[-1] <= number + 1
        assert all(each.windows <= 10.0 + 1e-9 for each in state.arms)

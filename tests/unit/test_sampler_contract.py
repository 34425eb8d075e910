"""A strategy that draws what it must not is named, and ends the sampler."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.sampler.pool import Knowledge, pool_entry
from services.sampler.strategies import strategy_named
from services.sampler.strategies.base import Strategy, StrategyError, drawn, has_advantage, weighted
from tests.installed_packages import forget, install
from tests.unit.sampler_groups import scored_group
from tests.unit.sampler_history import History, limits, sampler


@pytest.fixture(autouse=True)
def _forget_packages() -> Iterator[None]:
    yield
    forget()


ENTRIES = [pool_entry(seq, scored_group(seq, node=f"n{min(seq, 3)}", origin="external")) for seq in range(1, 7)]
"""Of the nodes n1, n2 and, four of them, n3."""
OTHER = replace(ENTRIES[0], seq=99)


def drawing(found: Any) -> Strategy:
    return Strategy("mine", keeps=has_advantage, draw=lambda *_: found)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "a NoneType instead of a list of entries"),
        (iter(ENTRIES[:3]), "a list_iterator instead of a list"),
        (ENTRIES, r"6 entries where 3 must be drawn \(3 wanted, at most 2 of one node\)"),
        ([], "0 entries where 3 must be drawn"),
        ([ENTRIES[0], ENTRIES[1], ENTRIES[0]], "the same entry more than once, in 3 entries"),
        ([ENTRIES[0], ENTRIES[1], OTHER], "1 of 3 entries that it was not offered"),
        ([ENTRIES[0], replace(ENTRIES[1], node="n1"), "n3"], "2 of 3 entries that it was not offered"),
        (ENTRIES[3:], "3 entries of node n3, where one node may have 2"),
    ],
)
def test_a_draw_that_breaks_its_promise_names_the_strategy_and_what_it_returned(found: Any, words: str) -> None:
    with pytest.raises(StrategyError, match=f"strategy mine returned {words}.*: correct its draw, or change sampler.strategy"):
        drawn(drawing(found), ENTRIES, 3, 2, random.Random(0), Knowledge())


def test_a_draw_that_keeps_its_promise_is_taken_in_its_order() -> None:
    right = (ENTRIES[4], ENTRIES[0], ENTRIES[3])
    assert drawn(drawing(right), ENTRIES, 3, 2, random.Random(0), Knowledge()) == list(right)
    assert drawn(strategy_named("uniform"), [], 3, 2, random.Random(0), Knowledge()) == []


@pytest.mark.parametrize("draws", ["list(entries)", "[entries[0]] * wanted"])
def test_no_batch_is_built_of_a_draw_that_breaks_its_promise(draws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from services.sampler.strategies.base import Strategy, has_advantage\n"
        f"mine = Strategy('mine', keeps=has_advantage, draw=lambda entries, wanted, *_: {draws})\n"
    )
    install(tmp_path, monkeypatch, "swarm.strategies", "mine", code)
    chosen = sampler(strategy="mine")
    made = History(chosen, limits(chosen))
    for number in range(3):
        made.publish(scored_group(number))
        made.publish(scored_group(number, node="beta", origin="external"))
    with pytest.raises(StrategyError, match="strategy mine of the package my-package returned "):
        made.step()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (None, "a NoneType, which is no list of numbers"),
        ("heavy", "a str, which is no list of numbers"),
        ([1.0, 2.0], "2 numbers where 6 are needed"),
        ([1.0] * 7, "7 numbers where 6 are needed"),
        ([1.0] * 5 + [math.inf], "the number inf, which is not finite"),
        ([math.nan] * 6, "the number nan, which is not finite"),
        ([10**400] * 6, "a list, which is no list of numbers"),
        ([1.0] * 5 + [-1.0], "numbers from -1.0 to 1.0"),
        ([0.0] * 6, "numbers from 0.0 to 0.0"),
        ([1e308] * 6, r"numbers from 1e\+308 to 1e\+308"),
    ],
)
def test_weights_that_no_draw_can_use_name_the_strategy_and_what_it_returned(weights: Any, words: str) -> None:
    strategy = weighted("mine", lambda *_: weights)
    with pytest.raises(StrategyError, match=f"strategy mine returned, as weights, {words}.*: correct its weigh, or change sampler"):
        drawn(strategy, ENTRIES, 3, 2, random.Random(0), Knowledge())


def test_weights_of_an_own_draw_are_held_to_the_same() -> None:
    """`weighted` is not all that weighs: a batch tells the weights of any strategy."""
    chosen = sampler(strategy="uniform")
    made = History(chosen, limits(chosen))
    for number in range(3):
        made.publish(scored_group(number))
        made.publish(scored_group(number, node="beta", origin="external"))
    made.read()
    uniform = strategy_named("uniform")
    made.assembly._strategy = replace(uniform, weigh=lambda *_: [math.nan] * 3)
    with pytest.raises(StrategyError, match="strategy uniform returned, as weights, the number nan"):
        made.decide()


def test_some_weights_may_be_0_and_any_kind_of_number() -> None:
    strategy = weighted("mine", lambda *_: (0, 5e-324, 1, True, 1e300, 0.0))
    assert len(drawn(strategy, ENTRIES, 3, 2, random.Random(0), Knowledge())) == 3

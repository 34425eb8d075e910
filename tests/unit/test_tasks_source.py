"""Drawing, holding out and checking task sources."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import Enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import TaskSpec
from shared.contracts.messages import Task, TaskRef
from shared.tasks import (
    HeldOut,
    TaskConfigError,
    TaskError,
    TaskSource,
    check_specs,
    derive_task,
    held_out_tasks,
)
from shared.tasks.derive import canonical_json, parse_config
from shared.tasks.held_out import HELD_OUT_SEED

SPECS = [
    TaskSpec(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, weight=1),
    TaskSpec(dataset="gcd", weight=3),
]


@given(st.integers(0, 2**40), st.integers(0, 50))
def test_a_draw_always_names_the_same_task_and_stays_in_range(draw: int, attempt: int) -> None:
    sources = [TaskSource(SPECS, sizes=[500, 7], node="alpha", seed=3) for _ in range(2)]
    ref = sources[0].ref(draw, attempt)
    assert ref == sources[1].ref(draw, attempt)
    size = 500 if ref.dataset == "chain_sum" else 7
    assert ref.index < size
    assert ref.seed + ref.index < HELD_OUT_SEED


def test_weights_nodes_and_seeds_shape_the_draws() -> None:
    draws = range(4000)
    alpha = [TaskSource(SPECS, sizes=[500, 500], node="alpha", seed=0).ref(draw) for draw in draws]
    beta = [TaskSource(SPECS, sizes=[500, 500], node="beta", seed=0).ref(draw) for draw in draws]
    assert abs(sum(ref.dataset == "gcd" for ref in alpha) / 4000 - 0.75) < 0.03
    assert not set(alpha) & set(beta)
    assert len(set(alpha)) == 4000


def test_who_knows_a_node_and_its_past_draws_cannot_tell_the_next_ones() -> None:
    """Node id and seed are public, and so is every task that was shared."""
    source = TaskSource(SPECS, sizes=[500, 500], node="beta", seed=0, secret=b"k" * 16)
    assert source.ref(9) == TaskSource(SPECS, sizes=[500, 500], node="beta", seed=0, secret=b"k" * 16).ref(9)
    guessed = TaskSource(SPECS, sizes=[500, 500], node="beta", seed=0)
    draws = [source.ref(draw) for draw in range(2000)]
    assert not set(draws) & {guessed.ref(draw) for draw in range(2000)}
    known: dict[str, tuple[int, int]] = {}
    hits = 0
    for draw, ref in enumerate(draws):
        before = known.get(ref.dataset)
        # The best that the past gives: the seed stays, and the index is the draw's own or goes on
        # from the last.
        hits += before is not None and ref.seed == before[0] and ref.index in {draw % 500, before[1] + 1}
        known[ref.dataset] = (ref.seed, ref.index)
    assert hits <= 30, "chance: 2 of 500 in each draw"
    assert len({ref.seed + ref.index for ref in draws}) == 2000


def test_a_dataset_of_few_items_has_a_new_seed_for_every_draw() -> None:
    source = TaskSource(SPECS[:1], sizes=[7], node="beta", seed=0, secret=b"k")
    assert len({source.ref(draw).seed for draw in range(200)}) == 200


def test_the_held_out_set_is_distinct_shared_by_weight_and_never_drawn() -> None:
    held = held_out_tasks(SPECS, 40)
    assert held == held_out_tasks(SPECS, 40)
    assert len({task.text for task in held}) == len(held) == 40
    assert sum(task.ref.dataset == "gcd" for task in held) == 30
    assert all(task.ref.seed >= HELD_OUT_SEED for task in held)
    held_out = HeldOut(held)
    assert held_out.contains_text("  " + held[0].text.upper())
    source = TaskSource(SPECS, node="alpha", seed=0)
    candidates = [derive_task(source.ref(draw)) for draw in range(600)]
    assert any(held_out.contains(task) for task in candidates), "the test needs a draw that hits the held-out set"
    assert not any(held_out.contains(next(source.candidates(draw, held_out))) for draw in range(600))


def test_a_dataset_with_too_few_questions_gives_fewer_and_ends() -> None:
    tiny = [TaskSpec(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})]
    held = held_out_tasks(tiny, 5000)
    assert 100 < len(held) < 1000
    assert not list(TaskSource(tiny, node="a", seed=0).candidates(0, HeldOut(held)))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"dataset": "chain_sums"}, ["[[tasks]] 1: ", "chain_sums", "did you mean chain_sum"]),
        ({"dataset": "gcd", "config": {"min_numers": 2}}, ["gcd", "'min_numers'", "min_numbers"]),
        ({"dataset": "gcd", "config": {"min_numbers": -2}}, ["gcd", "min_numbers must be at least 2"]),
        ({"dataset": "gcd", "config": {"size": 0}}, ["gcd", "size"]),
        ({"dataset": "composite"}, ["composite", "[[tasks]]"]),
        ({"dataset": "basic_arithmetic", "config": {"operators": ["+exit()+"]}}, ["operators", "exit()"]),
    ],
)
def test_unusable_sources_are_refused_with_dataset_key_cause_and_remedy(spec: dict[str, object], words: list[str]) -> None:
    with pytest.raises(TaskConfigError) as caught:
        check_specs([TaskSpec.model_validate(spec)])
    for word in words:
        assert word in str(caught.value)
    check_specs(SPECS)


def test_canonical_json_does_not_depend_on_containers_or_order() -> None:
    class Colour(Enum):
        RED = "red"

    value = {"b": (1, 2), "a": {3, 1}, 7: np.int64(4), "t": datetime(2026, 1, 2), "d": timedelta(hours=1), "n": float("nan"),
             "x": np.arange(2), "e": Colour.RED, "f": frozenset({"q", "p"}), "k": {(1, 2): None}, "o": object()}  # fmt: skip
    text = canonical_json(value)
    assert text == canonical_json(dict(reversed(list(value.items()))))
    assert '"a":[1,3]' in text
    assert '"7":4' in text
    assert '"f":["p","q"]' in text
    assert '"t":"2026-01-02T00:00:00"' in text
    assert " at 0x" not in text


@given(st.text(max_size=300))
def test_foreign_configurations_never_do_more_than_raise_value_error(text: str) -> None:
    for config in (text, "[" * 5000, '{"a":' * 2000, '{"a": NaN}', '{"seed": 1}', '{"a": 1e300}', '{"__class__": 1}'):
        try:
            parse_config(config)
        except ValueError:
            continue
        assert config == text


DIVIDES_BY_ZERO = TaskRef(
    dataset="decimal_arithmetic",
    config='{"max_num_decimal_places":1,"max_terms":3,"min_num_decimal_places":1,"min_terms":3,"precision":4}',
    seed=718851640,
    index=249,
)
"""An item that reasoning-gym itself cannot make."""


def test_an_item_that_cannot_be_made_says_so_and_its_error_comes_through_from_another_process() -> None:
    with pytest.raises(TaskError, match=r"decimal_arithmetic: item 249 .* cannot be generated: DivisionByZero") as caught:
        derive_task(DIVIDES_BY_ZERO)
    assert caught.value.only_this_item
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.reason, str(again)) == (TaskError, "task_underivable", str(caught.value))


def fail(patch: pytest.MonkeyPatch, fails: Callable[[TaskRef], bool], error: TaskError | None = None) -> None:
    """Have chosen items fail, since hardly any item of a real dataset cannot be made."""

    def derive(ref: TaskRef) -> Task:
        if fails(ref):
            raise error or TaskError("task_underivable", f"item {ref.index} cannot be made")
        return derive_task(ref)

    patch.setattr("shared.tasks.source.derive_task", derive)
    patch.setattr("shared.tasks.held_out.derive_task", derive)


def test_an_item_that_cannot_be_made_is_passed_over_by_draws_and_by_the_held_out_set(monkeypatch: pytest.MonkeyPatch) -> None:
    source = TaskSource(SPECS, node="alpha", seed=3)
    first, second = source.ref(5, 0), source.ref(5, 1)
    fail(monkeypatch, lambda ref: ref == first)
    assert next(source.candidates(5, HeldOut([]))).ref == second
    whole = held_out_tasks(SPECS, 30)
    left_out = whole[4].ref
    fail(monkeypatch, lambda ref: ref == left_out)
    made = held_out_tasks(SPECS, 30)
    assert len(made) == 30 and left_out not in {task.ref for task in made}
    assert [task.ref for task in whole[:4]] == [task.ref for task in made[:4]]


def test_a_dataset_that_cannot_be_used_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source = TaskSource(SPECS, node="alpha", seed=3)
    for error in (None, TaskError("task_config", "no such key")):
        fail(monkeypatch, lambda ref: True, error)
        with pytest.raises(TaskError, match=r"cannot be made|no such key"):
            next(source.candidates(5, HeldOut([])))
        with pytest.raises(TaskError, match=r"cannot be made|no such key"):
            held_out_tasks(SPECS, 30)

"""Mistakes in an installed task source are told before a node starts, instead of failing groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config.task_sections import TaskSpec
from shared.contracts.codec import decode, encode
from shared.contracts.messages import Task
from shared.tasks import HeldOut, TaskSource, held_out_tasks
from shared.tasks.derive import MAX_ITEMS, forget_derived
from shared.tasks.specs import check_specs, source_problems
from tests import installed_packages

SOURCE = """
import random
class Text(str): pass
class Panic(BaseException): "As a library in Rust raises it: no `Exception`."
def panic(): raise Panic("rust")
class mine:
    def __init__(self, settings, seed): self.seed = seed
    def __len__(self): return {size}
    def __getitem__(self, index): return dict(question={question}, answer={answer})
"""
MISTAKES = {
    ("500", "f'q {random.random()}'", "'1'"): "mine: item 0 of seed 1 has another prompt when it is derived again",
    ("500", "f'q {self.seed} {index}'", "str(random.random())"): "mine: item 0 of seed 1 has another answer when",
    ("500", "f'q \\ud800 {index}'", "'1'"): "item 0 of seed 1 under {} cannot be generated: UnicodeEncodeError",
    ("500", "f'q \\ud800' if index == 499 else 'q'", "'1'"): "item 499 of seed 1 under {} cannot be generated: UnicodeEncodeError",
    ("500", "'q' * 300_000", "'1'"): "ValueError: a prompt of 300000 characters, at most 262144; correct its package",
    ("500", "' '", "'1'"): "its question is empty",
    ("0", "'q'", "'1'"): "mine: its size is 0; let its `__len__` return at least 1",
    ("2**40", "'q'", "'1'"): "let its `__len__` return at most 1,073,741,824",
    ("random.choice", "'q'", "'1'"): "TypeError",
    ("panic()", "'q'", "'1'"): "mine: config {} under seed 0 is refused: Panic: rust",
    ("500", "panic()", "'1'"): "item 0 of seed 1 under {} cannot be generated: Panic: rust; correct its package",
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """A package with a task source `mine`, from the size, question and answer that the test is
    called with.
    """
    size, question, answer = request.param
    code = SOURCE.format(size=size, question=question, answer=answer)
    installed_packages.install(tmp_path, monkeypatch, "swarm.task_sources", "mine", code)
    forget_derived()
    yield
    monkeypatch.undo()
    installed_packages.forget()
    forget_derived()


@pytest.mark.parametrize(("written", "said"), MISTAKES.items(), indirect=["written"])
def test_config_check_says_what_a_task_source_does_wrong(written: None, said: str) -> None:
    (problem,) = source_problems([TaskSpec(dataset="mine")])
    assert said in problem


@pytest.mark.parametrize("written", [("3", "Text(f'q {self.seed} {index}')", "index")], indirect=True)
def test_text_of_a_packages_own_kind_travels(written: None) -> None:
    specs = check_specs([TaskSpec(dataset="mine")])
    task = next(TaskSource(specs, node="alpha", seed=1).candidates(0, HeldOut([])))
    assert decode(encode(task), Task) == task


@pytest.mark.parametrize("size", [MAX_ITEMS + 1, 0x7E000000, 3_000_000_000])
def test_a_dataset_larger_than_seeds_have_room_for_is_refused(size: int) -> None:
    """Its groups were made and could not be read, so that the node never took a step."""
    (problem,) = source_problems([TaskSpec(dataset="chain_sum", config={"size": size})])
    assert problem.endswith(f"chain_sum: its size is {size}; set `size` to at most 1,073,741,824")


def test_a_question_that_is_too_long_for_a_message_is_told_of_any_dataset() -> None:
    config = {"min_terms": 100_000, "max_terms": 100_000}
    (problem,) = source_problems([TaskSpec(dataset="chain_sum", config=config)])
    assert "characters, at most 262144" in problem and problem.endswith("change the dataset's config")


def test_tasks_of_the_largest_dataset_travel() -> None:
    specs = check_specs([TaskSpec(dataset="chain_sum", config={"size": MAX_ITEMS})], 8)
    held_out = held_out_tasks(specs, 8, draw=300)
    drawn = [next(TaskSource(specs, node="alpha", seed=1).candidates(draw, HeldOut(held_out))) for draw in range(20)]
    for task in [*held_out, *drawn]:
        assert decode(encode(task), Task) == task

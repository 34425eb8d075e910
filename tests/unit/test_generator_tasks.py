"""Which task a draw of the generator is."""

from __future__ import annotations

import pytest

import services.generator.tasks as generator_tasks
from services.generator.tasks import Prompter
from shared.config import NodeConfig
from shared.contracts.messages import Task, TaskRef
from shared.tasks import HeldOut, TaskError, derive_task
from tests.engines.tiny_models import byte_tokenizer


def prompter() -> Prompter:
    config = NodeConfig(tasks=[{"dataset": "decimal_arithmetic"}, {"dataset": "gcd"}], generator={"max_new_tokens": 8})
    return Prompter(config, byte_tokenizer(), 4096, HeldOut([]))


def test_a_draw_whose_item_cannot_be_made_is_the_next_candidate_and_not_the_generator_s_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = prompter().for_draw(3)
    failed: list[TaskRef] = []

    def fails_once(ref: TaskRef) -> Task:
        if not failed or ref in failed:
            failed.append(ref)
            raise TaskError("task_underivable", "DivisionByZero")
        return derive_task(ref)

    monkeypatch.setattr(generator_tasks, "derive_task", fails_once)
    other = prompter().for_draw(3)
    assert failed == [usual.task.ref] and other.task.ref != usual.task.ref
    assert prompter().for_draw(3) == other, "and always the same one"


@pytest.mark.parametrize("reason", ["task_underivable", "task_dataset"])
def test_a_dataset_that_makes_nothing_is_said(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def fails(ref: TaskRef) -> Task:
        raise TaskError(reason, "decimal_arithmetic: nothing comes of it")

    monkeypatch.setattr(generator_tasks, "derive_task", fails)
    with pytest.raises(TaskError, match="nothing comes of it"):
        prompter().for_draw(3)

"""Which task a draw of the generator is."""

from __future__ import annotations

import time

import pytest

from services.generator.tasks import Prompter
from shared.config import NodeConfig, TaskSpec
from shared.contracts.messages import Task, TaskRef
from shared.runtime import FatalError
from shared.tasks import HeldOut, TaskError, derive_task, held_out_tasks
from tests.engines.tiny_models import byte_tokenizer


def prompter() -> Prompter:
    config = NodeConfig(tasks=[{"dataset": "decimal_arithmetic"}, {"dataset": "gcd"}], generator={"max_new_tokens": 8})
    return Prompter(config, byte_tokenizer(), 4096, HeldOut([]))


def test_a_draw_whose_item_cannot_be_made_is_the_next_candidate_and_not_the_generator_s_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its failing is made up: hardly any item of a real dataset cannot be made."""
    usual = prompter().for_draw(3)
    failed: list[TaskRef] = []

    def fails_once(ref: TaskRef) -> Task:
        if not failed or ref in failed:
            failed.append(ref)
            raise TaskError("task_underivable", "DivisionByZero")
        return derive_task(ref)

    monkeypatch.setattr("shared.tasks.source.derive_task", fails_once)
    other = prompter().for_draw(3)
    assert failed == [usual.task.ref] and other.task.ref != usual.task.ref
    assert prompter().for_draw(3) == other, "and always the same one"


@pytest.mark.parametrize("reason", ["task_underivable", "task_dataset"])
def test_a_dataset_that_makes_nothing_is_said(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """No shipped dataset makes nothing, so one is made to."""

    def fails(ref: TaskRef) -> Task:
        raise TaskError(reason, "decimal_arithmetic: nothing comes of it")

    monkeypatch.setattr("shared.tasks.source.derive_task", fails)
    with pytest.raises(TaskError, match="nothing comes of it"):
        prompter().for_draw(3)


def test_a_node_whose_questions_are_all_held_out_or_too_long_is_told_which_and_what_to_change() -> None:
    tiny = TaskSpec(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    config = NodeConfig(tasks=[tiny], generator={"max_new_tokens": 8})
    all_of_them = HeldOut(held_out_tasks([tiny], 5000))
    with pytest.raises(
        FatalError, match=r"chain_sum: none of the 1000 .*; 1000 are held out for evaluation: lower eval.tasks"
    ) as told:
        Prompter(config, byte_tokenizer(), 4096, all_of_them).for_draw(0)
    assert "max_new_tokens" not in str(told.value)
    with pytest.raises(
        FatalError, match=r"; 1000 are longer than the 2 prompt tokens that generator.max_new_tokens leaves"
    ) as told:
        Prompter(config, byte_tokenizer(), 10, HeldOut([])).for_draw(0)
    assert "eval.tasks" not in str(told.value)
    some_of_them = HeldOut(held_out_tasks([tiny], 30))
    with pytest.raises(FatalError, match=r"; \d+ are longer .*; \d+ are held out"):
        Prompter(config, byte_tokenizer(), 10, some_of_them).for_draw(0)


@pytest.mark.slow
def test_a_question_that_the_chat_template_cannot_write_is_passed_over_counted_and_tried_once() -> None:
    config = NodeConfig(tasks=[{"dataset": "decimal_arithmetic"}, {"dataset": "gcd"}], generator={"max_new_tokens": 8})
    tokenizer = byte_tokenizer()
    plain = [Prompter(config, tokenizer, 4096, HeldOut([])).for_draw(draw).task for draw in range(12)]
    bad = next(task for task in plain if task.ref.dataset == "gcd")
    never = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = (
        "{% if messages[0].content == " + repr(bad.text) + " %}" + never + "{% endif %}{{ messages[0].content }}\n"
    )
    asked = Prompter(config, tokenizer, 4096, HeldOut([]))
    found = [asked.for_draw(draw).task for draw in range(12)]
    assert [each for each in found if each.ref.dataset != "gcd"] == [each for each in plain if each.ref.dataset != "gcd"]
    assert bad not in found and bad in plain and len(found) == len(plain)
    assert list(asked.unwritable["gcd"]) == [bad.text] and not asked.unwritable.get("decimal_arithmetic")
    started = time.monotonic()
    other = next(task for task in plain if task != bad)
    assert [each.task for each in asked.held_out([bad, other])] == [other]
    assert time.monotonic() - started < 1


def test_a_template_that_writes_no_question_of_a_dataset_is_told() -> None:
    config = NodeConfig(tasks=[{"dataset": "gcd"}], generator={"max_new_tokens": 8})
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content | upper }}"
    with pytest.raises(FatalError, match="1000 are questions that the model's chat template cannot write"):
        Prompter(config, tokenizer, 4096, HeldOut([])).for_draw(0)

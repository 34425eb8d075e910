"""One process derives the tasks of several configurations, one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.config import load_config
from swarm_cli.task_probe import TaskProbe

pytestmark = pytest.mark.slow  # it imports reasoning-gym in fresh processes


def children() -> set[str]:
    return set(Path("/proc/thread-self/children").read_text().split())


def problems(apart: TaskProbe, deadline_s: float | None = None, **task: Any) -> list[str]:
    return list(apart.derive(load_config(overrides={"tasks": [task]}).tasks, 0, "REMEDY", (), deadline_s).problems)


def test_one_process_answers_all_questions_and_ends_with_the_context() -> None:
    before = children()
    with TaskProbe() as apart:
        assert children() == before, "nobody has asked yet"
        assert problems(apart, dataset="gcd") == []
        (first,) = children() - before
        (told,) = problems(apart, dataset="gdc")
        assert "gdc: neither reasoning-gym nor" in told
        assert problems(apart, dataset="gcd", config={"max_numbers": 3}) == []
        assert children() - before == {first}
    assert children() == before


def test_after_a_question_that_takes_too_long_another_process_answers() -> None:
    for_ever = {"min_terms": 400_000_000, "max_terms": 400_000_000, "min_digits": 1, "max_digits": 1}
    before = children()
    with TaskProbe() as apart:
        (told,) = problems(apart, 1.0, dataset="chain_sum", config=for_ever)
        assert "took longer than 1 s (chain_sum;" in told and told.endswith("REMEDY")
        assert children() == before
        assert problems(apart, dataset="chain_sum") == []
    assert children() == before

"""Wrong answers to tasks of every dataset, through the real sandbox: none earns full marks.

`swarm task audit` is the same for one dataset or verifier. Slow variants look at more
configurations.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

from shared.contracts.messages import TaskRef
from shared.tasks.audit.run import Finding, audit
from shared.tasks.derive import dataset_names
from shared.tasks.sandbox import ScorerPool

SEED, THOROUGH = 9, 3
ANSWER_TIMEOUT_S = 60.0
"""Generous, because on a loaded machine one second of work may take many."""
UNPAID_REFERENCES = {
    "propositional_logic": "from contradictory premises everything follows, so that nothing is worth full marks",
    "jugs": "its solver uses three jugs: where the fourth is needed, the reference is 'No solution', and other answers are right",
}

SENDERS_CHOICE: dict[str, dict[str, Any]] = {
    "coin_flip": {"min_trials": 30, "max_trials": 40},
    "game_of_life": {"grid_size_x": 50, "grid_size_y": 50, "filled_cells": 250},
    "time_intervals": {"max_time_difference_seconds": 10**9, "max_date_difference_days": 10**5},
    "decimal_arithmetic": {"min_num_decimal_places": 0, "max_num_decimal_places": 0, "precision": 3},
    "number_format": {"max_delta": 0.001},
    "emoji_mystery": {"min_words_in_sentence": 30, "max_words_in_sentence": 35},
    "figlet_font": {"min_word_len": 14, "max_word_len": 20},
    "number_sorting": {"min_value": -0.5, "max_value": 0.5, "max_decimals": 2},
    "countdown": {"min_value": 500_000, "max_value": 900_000, "min_target": 10**6, "max_target": 10**7},
    "calendar_arithmetic": {"tasks": ["recurring_event_day", "count_days", "is_leap_year"]},
    "palindrome_partitioning": {"min_string_len": 3, "max_string_len": 5},
    "complex_arithmetic": {"min_real": 0, "max_real": 0},
    "letter_jumble": {"min_words": 30, "max_words": 40},
    "quantum_lock": {"difficulty": 2},
}
"""Configurations that a sender could choose because answers nearly right, or always the same, are
paid with them.
"""


def check(findings: dict[str, Finding]) -> None:
    paid = [
        (name, ref.index, candidate.kind, candidate.name, candidate.text[:200])
        for name, finding in findings.items()
        for ref, candidate, _ in finding.paid
    ]
    assert not paid
    for name, finding in findings.items():
        assert finding.wrong > 60, name
        answered = finding.right_paid + finding.unanswered
        assert answered == finding.tasks or name in UNPAID_REFERENCES, (name, finding.right_paid, finding.tasks)


@pytest.mark.deadline(600)
@pytest.mark.parametrize("count", [1, pytest.param(THOROUGH, marks=pytest.mark.long)])
async def test_no_wrong_answer_to_any_dataset_earns_full_marks(count: int) -> None:
    findings = await audited({name: {} for name in dataset_names()}, count, SEED)
    assert sum(finding.wrong for finding in findings.values()) > count * 10_000
    assert sum(finding.timeouts for finding in findings.values()) == 0
    check(findings)


@pytest.mark.deadline(600)
async def test_no_wrong_answer_earns_full_marks_under_configurations_that_a_sender_would_choose() -> None:
    check(await audited({name: SENDERS_CHOICE[name] for name in SENDERS_CHOICE}, 3))


@pytest.mark.slow
@pytest.mark.deadline(600)
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.long), 1])
async def test_no_wrong_answer_earns_full_marks_at_the_levels_of_the_curricula(level: int, count: int) -> None:
    # Levels of these are no configuration: below a limit of their own, or with objects as settings.
    left_out = {"arc_agi", "knight_swap", "modulo_grid", "rearc"}
    configs = {name: curriculum_config(name, level) for name in dataset_names() if name in CURRICULA.keys() - left_out}
    check(await audited(configs, count))


async def audited(configs: dict[str, dict[str, Any]], count: int, seed: int = 17) -> dict[str, Finding]:
    refs = [
        TaskRef(dataset=name, config=json.dumps(config, sort_keys=True, separators=(",", ":")), seed=seed, index=index)
        for name, config in configs.items()
        for index in range(count)
    ]
    async with ScorerPool(workers=1, answer_timeout_s=ANSWER_TIMEOUT_S, memory_mb=2048) as pool:
        findings = await audit(pool, refs)
    assert findings.keys() == configs.keys()
    return findings


def curriculum_config(name: str, level: int) -> dict[str, Any]:
    curriculum = create_curriculum(name)
    for attribute in curriculum.attributes:
        curriculum.set_attr_level(attribute, level)
    default = DATASETS[name][1]()
    chosen = dataclasses.asdict(curriculum.generate_configuration({"size": 50}))
    return {key: value for key, value in chosen.items() if key != "seed" and value != getattr(default, key)}

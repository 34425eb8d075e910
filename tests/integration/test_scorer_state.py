"""A reward depends on the task and the answer alone: every dataset before and after all others'
hostile configurations.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from shared.contracts.messages import TaskRef
from shared.tasks.derive import dataset_names, datasets, derive_task
from shared.tasks.sandbox import ScorerPool, ScoringJob

WRONG = ["0", "1.5", "x"]
POISON = {
    "decimal_arithmetic": ['{"max_num_decimal_places":1,"min_num_decimal_places":1,"precision":3}'],
}
"""Configurations known to change the process that they are derived in."""


def hostile_configs(dataset: str) -> list[str]:
    """Every number in the dataset's configuration made smaller; many are refused, the rest derives
    as it may.
    """
    made: Any = datasets()[dataset][1]
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(made)
        if type(field.default) in (int, float) and field.name not in {"seed", "size"}
    }
    smaller = {name: type(value)(value / 2) for name, value in defaults.items()}
    return [json.dumps(smaller, sort_keys=True, separators=(",", ":"))] if smaller else []


def ordinary_jobs(answers: dict[str, str], sender: str | None) -> list[ScoringJob]:
    return [
        ScoringJob(ref=TaskRef(dataset=name, seed=1, index=0), texts=[answers[name], *WRONG], sender=sender) for name in answers
    ]


async def test_every_dataset_pays_the_same_before_and_after_every_other_ones_hostile_configs() -> None:
    names = dataset_names()
    poison = [(name, config) for name in names for config in (*POISON.get(name, ()), *hostile_configs(name))]
    async with ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=2048, foreign_workers=1, foreign_group_s=30.0) as pool:
        derived = await pool.run([ScoringJob(ref=TaskRef(dataset=name, seed=1, index=0), want_task=True) for name in names])
        answers = {name: result.task.answer or "" for name, result in zip(names, derived, strict=True) if result.task is not None}
        assert len(answers) > 90
        before = await pool.run(ordinary_jobs(answers, None))
        assert before == await same(pool, answers, None, before), "the same twice"
        hostile = [ScoringJob(ref=TaskRef(dataset=name, config=config, seed=2, index=0), texts=["1"]) for name, config in poison]
        refused = sum(result.reason is not None for result in await pool.run(in_foreign_lane(hostile)))
        print(f"{len(poison)} hostile configurations of {len(names)} datasets, {refused} refused")
        await same(pool, answers, None, before)
        await same(pool, answers, "Uhonest", before)


def in_foreign_lane(jobs: list[ScoringJob]) -> list[ScoringJob]:
    return [ScoringJob(ref=job.ref, texts=job.texts, sender="Uhostile") for job in jobs]


async def same(pool: ScorerPool, answers: dict[str, str], sender: str | None, before: list[Any]) -> list[Any]:
    after = await pool.run(ordinary_jobs(answers, sender))
    differ = {
        name: (first.rewards, second.rewards, second.reason)
        for name, first, second in zip(answers, before, after, strict=True)
        if first.rewards != second.rewards
    }
    assert differ == {}
    return before


async def test_a_precision_that_this_nodes_own_tasks_set_does_not_reach_its_other_tasks() -> None:
    """In one and the same process: decimal_arithmetic at 3 digits, then datasets that compare
    decimals.
    """
    imprecise = TaskRef(dataset="decimal_arithmetic", config=POISON["decimal_arithmetic"][0], seed=1, index=0)
    poison = ScoringJob(ref=imprecise, texts=["1"])
    refs = [TaskRef(dataset=name, seed=1, index=index) for name in ("decimal_chain_sum", "power_function") for index in range(20)]
    tasks = [derive_task(ref) for ref in refs]
    async with ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=2048) as pool:
        jobs: list[ScoringJob] = []
        for task in tasks:
            jobs += [poison, ScoringJob(ref=task.ref, texts=[str(task.answer)], expected=task)]
        results = await pool.run(jobs)
        assert all(result.reason is None for result in results[::2]), "the poison is an ordinary task"
        assert [result.rewards for result in results[1::2]] == [[1.0]] * len(refs)
        assert pool.replaced == 0

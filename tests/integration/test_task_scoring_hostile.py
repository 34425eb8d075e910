"""Every dataset of reasoning-gym, in the sandbox, against hostile answers.

Every dataset meets every answer, the megabyte ones included (longer than 65,536 characters never
reaches a scorer); one task for each dataset. Some of the answers are right or half right for some
dataset; so only the interval of the reward is checked. The one dataset that is refused is
`composite`, for the reason given in `REFUSED_DATASETS`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reasoning_gym.factory import DATASETS

from shared.contracts.messages import TaskRef
from shared.tasks.derive import REFUSED_DATASETS, dataset_names
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob
from tests.integration.hostile_answers import hostile_answers

ANSWER_TIMEOUT_S = 5.0
RAISES_OR_HANGS = {
    "coin_flip": ["1e9999999999", "1/1e-9999999999", "heads", "½"],
    "rubiks_cube": ["R999999999", "x**99999999", "1" * 4300],
    "rush_hour": ["A+999999999", "F+1 K+99999", "F-" + "9" * 60_000, ""],
    "prime_factorization": ["two", "2 × x", "½", "1e9", "9" * 60_000],
    "boxnet": ["[1]", "null", "1", '"a"', '{"a": 1}', '{"a": {"b": [null]}}', "not JSON"],
}
"""In reasoning-gym itself these raise, allocate without bound, or never end."""


def test_the_hostile_answers_would_run_where_something_evaluates_them(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    answer = hostile_answers(mark)[0]
    subprocess.run([sys.executable, "-c", "import sys; eval(sys.argv[1])", answer], check=True, timeout=180)
    assert mark.exists()


async def scored(jobs: Sequence[ScoringJob]) -> tuple[list[JobResult], int]:
    """The results, in time, and how many workers were lost."""
    started_s = time.monotonic()
    async with ScorerPool(workers=2, answer_timeout_s=ANSWER_TIMEOUT_S, memory_mb=2048) as pool:
        results = await pool.run(jobs)
        replaced = pool.replaced
    assert time.monotonic() - started_s < 120
    return results, replaced


async def test_no_hostile_answer_to_any_dataset_runs_code_outlasts_its_deadline_or_leaves_the_unit_interval(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    answers = hostile_answers(mark)
    assert len(set(answers)) == len(answers) >= 50
    names = dataset_names()
    assert set(names) | set(REFUSED_DATASETS) == set(DATASETS)
    assert REFUSED_DATASETS.keys() == {"composite"} and len(names) >= 105
    jobs = [ScoringJob(ref=TaskRef(dataset=name, seed=5, index=2), texts=answers) for name in names]
    results, replaced = await scored(jobs)
    blamed = [(name, result.timeouts) for name, result in zip(names, results, strict=True) if result.timeouts]
    # A machine that stands still for seconds costs a worker too, at no answer: deriving a task has
    # the same deadline. What answers do to a worker they do again.
    if replaced and not blamed:
        results, replaced = await scored(jobs)
    assert replaced == 0, blamed
    assert not mark.exists()
    for name, result in zip(names, results, strict=True):
        assert (result.reason, result.detail) == (None, ""), name
        assert len(result.rewards) == len(answers)
        for answer, reward in zip(answers, result.rewards, strict=True):
            assert 0.0 <= reward <= 1.0, (name, answer[:60])


async def test_answers_on_which_reasoning_gym_raises_or_hangs_earn_nothing_in_time() -> None:
    async with ScorerPool(workers=1, answer_timeout_s=ANSWER_TIMEOUT_S, memory_mb=2048) as pool:
        jobs = [
            ScoringJob(ref=TaskRef(dataset=name, seed=5, index=index), texts=answers)
            for name, answers in RAISES_OR_HANGS.items()
            for index in range(5)
        ]
        for job, result in zip(jobs, await pool.run(jobs), strict=True):
            assert result.reason is None
            assert result.rewards == [0.0] * len(job.texts), (job.ref.dataset, job.texts, result.rewards)
        assert pool.replaced == 0

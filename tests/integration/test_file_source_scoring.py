"""Tasks from the user's own file, judged in the sandbox: by processes that could not open the
file.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from shared.config import TaskSpec
from shared.contracts.messages import TaskRef
from shared.tasks import HeldOut, TaskSource, check_specs, derive_task, held_out_tasks
from shared.tasks.file_source import with_row_name
from shared.tasks.sandbox import ScorerPool, ScoringJob
from tests import forked


def source(file: Path, count: int, verifier: str = "final_number") -> TaskSpec:
    rows = ({"question": f"How much is {number} + 1?", "answer": number + 1} for number in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return with_row_name(TaskSpec(source="file", path=str(file), verifier=verifier))


async def test_own_and_foreign_groups_of_a_file_are_judged_without_the_file(tmp_path: Path) -> None:
    specs = [source(tmp_path / "rows.jsonl", 50), source(tmp_path / "others.jsonl", 20, "exact"), TaskSpec(dataset="gcd")]
    check_specs(specs, 20)
    for spec in specs[:2]:
        os.unlink(spec.path)
    refs = [TaskRef(dataset=spec.dataset, seed=5, index=7) for spec in specs[:2]]
    texts = ["It is 8", "8", "9"]
    async with ScorerPool(workers=1, answer_timeout_s=5, memory_mb=2048, tasks=specs, foreign_workers=1) as pool:
        jobs = [ScoringJob(ref=ref, texts=texts, want_task=True, expected=derive_task(ref)) for ref in refs]
        foreign = [ScoringJob(ref=job.ref, texts=texts, want_task=True, expected=job.expected, sender="U") for job in jobs]
        unknown = TaskRef(dataset="file_" + "0" * 40, seed=5, index=7)
        results = await pool.run([*jobs, *foreign, ScoringJob(ref=unknown, texts=["8"], sender="U")])
        assert [result.rewards for result in results[:4]] == 2 * [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
        assert {result.task.text for result in results[:4] if result.task} == {"How much is 7 + 1?"}
        assert results[4].reason == "task_dataset"
        outside = TaskRef(dataset=refs[0].dataset, seed=5, index=50)
        first, past_the_end = await pool.run([ScoringJob(ref=ref, want_task=True) for ref in (refs[0], outside)])
        assert first.task is not None
        assert first.task.answer == "8"
        assert "outside the file's 50 rows" in past_the_end.detail


async def test_no_held_out_row_is_drawn_for_training(tmp_path: Path) -> None:
    specs = [source(tmp_path / "rows.jsonl", 60), TaskSpec(dataset="gcd")]
    held_out = HeldOut(held_out_tasks(specs, 60))
    assert sum(task.ref.dataset == specs[0].dataset for task in held_out.tasks) == 30
    training = TaskSource(specs, node="alpha", seed=3)
    drawn = [next(training.candidates(draw, held_out)) for draw in range(300)]
    file_questions = {task.text for task in drawn if task.ref.dataset == specs[0].dataset}
    assert 20 < len(file_questions) <= 30
    assert not any(held_out.contains_text(question) for question in file_questions)


def test_the_command_line_shows_and_scores_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"q": "2 + 2?", "a": 4}\n')
    shown = swarm_task("show", str(file), "--columns", "q,a")
    assert "2 + 2?\nreference answer: 4" in shown.stdout, shown.stderr
    scored = swarm_task("score", str(file), "--columns", "q,a", "--verifier", "final_number", "--answer", "It is 4")
    assert scored.stdout == "1\n", scored.stderr
    refused = swarm_task("show", str(file))
    assert refused.returncode == 1
    assert "no column 'question'" in refused.stderr


def swarm_task(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run("swarm_cli", ["task", *arguments], environment=os.environ, cwd=Path.cwd(), timeout=180)

"""Writes a few held-out answers of each evaluation, for people to read: `samples.jsonl`, one line
per evaluation.

The questions are the same each time, so that one can read how an answer changes from version to
version (`swarm rollouts NODE --eval TASK`). Neither the questions nor the lines of this file enter
training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.generator.engines.base import Sample
from services.generator.tasks import PromptedTask
from shared.contracts.messages import Task
from shared.tasks.evaluation import Score

OF_A_DATASET = 4
IN_ALL = 32
TEXT_CHARACTERS = 2000
"""With 32 samples a line is smaller than 1.6 MB, whatever the characters; 20 KB is usual."""


def sampled_places(datasets: Sequence[str]) -> list[int]:
    """Indexes of the held-out tasks, given by their datasets, that are written: the first of each
    dataset, then the second of each, and so on. The same for the same tasks.
    """
    seen: dict[str, int] = {}
    rounds = []
    for place, dataset in enumerate(datasets):
        nth = seen[dataset] = seen.get(dataset, -1) + 1
        if nth < OF_A_DATASET:
            rounds.append((nth, place))
    return sorted(place for _, place in sorted(rounds)[:IN_ALL])


def samples_line(
    tasks: Sequence[PromptedTask], answers: Sequence[Sample], scores: Sequence[Score], *, policy_version: int, time_s: float
) -> str:
    """One line of the file. `answers` and `scores` belong to `tasks`, which are all held-out
    tasks.
    """
    places = sampled_places([each.task.ref.dataset for each in tasks])
    samples = [_sample(tasks[place].task, answers[place], scores[place]) for place in places]
    line = {"policy_version": policy_version, "time": round(time_s, 3), "samples": samples}
    return json.dumps(line, separators=(",", ":"))


def _sample(task: Task, answer: Sample, score: Score) -> dict[str, Any]:
    """A task, its answer and its score, with texts cut, so that a line's size is bounded."""
    ref = task.ref
    return {
        "dataset": ref.dataset,
        "seed": ref.seed,
        "index": ref.index,
        "question": task.question[:TEXT_CHARACTERS],
        "reference": None if task.answer is None else task.answer[:TEXT_CHARACTERS],
        "text": answer.text[:TEXT_CHARACTERS],
        "characters": len(answer.text),
        "reward": score[0],
        "passed": score[1],
        "tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason,
    }

"""Questions, answers and plausible wrong answers for the supervised start of the toy base policy.

The splits never overlap. The held-out set is fixed, and training skips every question whose text is
in it, because small configurations repeat questions under different seeds.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reasoning_gym

from shared.config import TaskSpec
from shared.tasks.held_out import HELD_OUT_SEED, HeldOut, held_out_tasks

# Training draws its seeds below HELD_OUT_SEED, and the held-out set lies right above it. Neither
# reaches this far.
SUPERVISED_SEED = HELD_OUT_SEED + 0x01000000
# reasoning-gym derives item i of seed s from Random(s + i), so seeds closer than this share items.
SEED_STRIDE = 1 << 18


@dataclass(frozen=True, slots=True)
class DemoTask:
    """One dataset of the demo: its reasoning-gym name, its share relative to the others, and its
    configuration.
    """

    dataset: str
    weight: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict)


TOY_NEEDS_DATASETS = "the toy policy learns from reasoning-gym's datasets, not from files: set model.path to a model of your own"


@dataclass(frozen=True, slots=True)
class Example:
    """A question and its right answer."""

    dataset: str
    question: str
    answer: str


def load_demo_tasks(path: Path) -> tuple[DemoTask, ...]:
    """Read the `[[tasks]]` tables of a TOML file. Raises ValueError naming the file when there are
    none.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("tasks", [])
    if not tables:
        raise ValueError(f"{path}: no [[tasks]] table: add at least one with a `dataset`")
    if any(table.get("source") == "file" for table in tables):
        raise ValueError(f"{path}: {TOY_NEEDS_DATASETS}")
    return tuple(DemoTask(t["dataset"], float(t.get("weight", 1.0)), dict(t.get("config", {}))) for t in tables)


def held_out_questions(tasks: Sequence[DemoTask], count: int) -> HeldOut:
    """Return the questions of an evaluation with `count` questions, which are never trained on."""
    specs = [TaskSpec(dataset=task.dataset, weight=task.weight, config=dict(task.config)) for task in tasks]
    return HeldOut(held_out_tasks(specs, count))


def draw_examples(task: DemoTask, seed: int, attempts: int, held_out: HeldOut) -> Iterator[Example]:
    """Yield distinct questions of one dataset that are not held out, trying `attempts` indices."""
    dataset = reasoning_gym.create_dataset(task.dataset, seed=seed, size=attempts, **task.config)
    seen: set[str] = set()
    for index in range(attempts):
        item = dataset[index]
        question, answer = item["question"], item["answer"]
        if answer is not None and question not in seen and not held_out.contains(question):
            seen.add(question)
            yield Example(task.dataset, question, str(answer))


def training_examples(
    tasks: Sequence[DemoTask], attempts: int, held_out: HeldOut, seed: int = SUPERVISED_SEED
) -> list[list[Example]]:
    """Return, per dataset, the distinct questions among `attempts` draws that are not held out.

    Raises ValueError when a dataset's configuration leaves fewer than two.
    """
    pools = [list(draw_examples(task, seed + position * SEED_STRIDE, attempts, held_out)) for position, task in enumerate(tasks)]
    for task, pool in zip(tasks, pools, strict=True):
        if len(pool) < 2:
            raise ValueError(f"{task.dataset}: all questions are in the held-out set: widen its config")
    return pools


def habitual_slip(answer: str) -> str:
    """Return the mistake that the policy is taught to prefer: the last digit one too high (9
    becomes 0).

    Text without a digit is reversed; a palindrome therefore stays right.
    """
    for position in range(len(answer) - 1, -1, -1):
        if answer[position] in "0123456789":
            return answer[:position] + str((int(answer[position]) + 1) % 10) + answer[position + 1 :]
    return answer[::-1]


def noisy_answer(
    example: Example, pool: Sequence[Example], rng: random.Random, *, correct_fraction: float, habit_fraction: float
) -> str:
    """Draw the answer to train on: the right one, the habitual slip, or the answer to another task
    of the dataset.

    `correct_fraction` and `habit_fraction` are probabilities; the rest goes to other tasks'
    answers.
    """
    draw = rng.random()
    if draw < correct_fraction:
        return example.answer
    slip = habitual_slip(example.answer)
    if draw < correct_fraction + habit_fraction and slip != example.answer:
        return slip
    return rng.choice(pool).answer

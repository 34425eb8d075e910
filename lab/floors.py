"""What answers without any skill earn on an experiment's datasets: always the same answer, a copy
from the question.

A gain on a dataset where one constant answer passes a tenth of the questions may be that constant,
learned. Such a dataset is `out`: reports give the gain without it beside the gain with it.

The best answer of each kind is chosen on one half of the questions and its pass rate is that on the
other half, because the best of a hundred on the questions that chose it looks better than it is.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.spec import SpecError
from shared.config import TaskSpec
from shared.contracts.messages import Task, TaskRef
from shared.evaluation import PASS_REWARD
from shared.tasks.audit.candidates import CONSTANTS, copies, shapes
from shared.tasks.audit.witnesses import right_answers
from shared.tasks.derive import TaskError, dataset_size, derive_task
from shared.tasks.sandbox import ScorerPool, ScoringJob

FLOORS_FILE = "floors.json"
OUT_FROM = 0.1
"""A dataset is out from this pass rate of a constant on."""
QUESTIONS = 200
SEED = 0x7D000000
"""The questions are none that nodes train on or are evaluated on."""
_OTHERS_ANSWERS = 60
"""Answers to other questions that are tried as constants, the most frequent ones."""
_MOST_ANSWERS = 40
_PATIENCE = 4
_ANSWER_TIMEOUT_S = 20.0

_Name = tuple[str, str]
"""Kind, constant or copy, and which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """One source. constant, copy: the best answer of the kind; their rates are parts of the
    questions passed, 0 to 1.
    """

    dataset: str
    config: str
    questions: int
    constant: str
    constant_rate: float
    copy: str
    copy_rate: float

    @property
    def out(self) -> bool:
        """Whether a constant passes too often for a gain to mean something."""
        return self.constant_rate >= OUT_FROM


async def screen(pool: ScorerPool, sources: Sequence[TaskSpec], questions: int = QUESTIONS) -> list[Floor]:
    """The floors of each source, in their order; a dataset that stands there twice with one config
    is screened once.

    `questions`: as many choose the best answers, and as many others tell their rates.

    Raises:
        SpecError: half of a source's items or more cannot be made.
    """
    distinct = {(source.dataset, source.canonical_config): source for source in sources}
    return [await _floor(pool, source, questions) for source in distinct.values()]


def sources_of(sources: Sequence[Sequence[TaskSpec]]) -> list[TaskSpec]:
    """All that any arm's nodes ask, once each."""
    return list({source.model_dump_json(): source for each in sources for source in each}.values())


def scorers(sources: Sequence[TaskSpec]) -> ScorerPool:
    """A pool that judges as the experiment's nodes do."""
    return ScorerPool(workers=os.cpu_count() or 1, answer_timeout_s=_ANSWER_TIMEOUT_S, memory_mb=2048, tasks=sources)


def write_floors(out: Path, floors: Sequence[Floor]) -> Path:
    """Beside the records, for reports."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / FLOORS_FILE
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps([asdict(floor) for floor in floors], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(draft, file)
    return file


def read_floors(results: Path) -> list[Floor] | None:
    """What `write_floors` wrote; None where the experiment was not screened.

    Raises:
        SpecError: the file is no such list.
    """
    file = results / FLOORS_FILE
    if not file.is_file():
        return None
    try:
        return [Floor(**each) for each in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise SpecError(f"{file}: cannot be read ({error}); remove it and run `swarm experiment screen`") from None


def out_datasets(floors: Sequence[Floor]) -> frozenset[str]:
    """Names of the datasets that are out, by any of their configs."""
    return frozenset(floor.dataset for floor in floors if floor.out)


async def _floor(pool: ScorerPool, source: TaskSpec, questions: int) -> Floor:
    """All answers to a question are scored as one job, so that its task is derived once. An answer
    that was not tried on a question counts as not passed there.
    """
    tasks = _tasks(source, questions)
    half = len(tasks) // 2
    rights = [right_answers(task) for task in tasks]
    usual = Counter(text for answers in rights[:half] for text in answers[:_MOST_ANSWERS])
    constants = [*CONSTANTS, *(text for text, _ in usual.most_common(_OTHERS_ANSWERS))]
    answers_of = [_skilless(task, right[0] if right else "", constants) for task, right in zip(tasks, rights, strict=True)]
    jobs = [
        ScoringJob(ref=task.ref, texts=[f"<answer>{text}</answer>" for text in answers.values()])
        for task, answers in zip(tasks, answers_of, strict=True)
    ]
    passed: dict[_Name, list[bool]] = defaultdict(lambda: [False] * len(tasks))
    for place, (answers, result) in enumerate(zip(answers_of, await pool.run(jobs), strict=True)):
        for name, reward in zip(answers, result.rewards, strict=False):
            passed[name][place] = reward >= PASS_REWARD
    constant, constant_rate = _best(passed, half, "constant")
    copy, copy_rate = _best(passed, half, "copy")
    return Floor(
        dataset=source.dataset,
        config=source.canonical_config,
        questions=len(tasks) - half,
        constant=constant,
        constant_rate=constant_rate,
        copy=copy,
        copy_rate=copy_rate,
    )


def _skilless(task: Task, right: str, constants: Sequence[str]) -> dict[_Name, str]:
    """Answers by kind and name. Of the right answer only the shape is used."""
    answers = {("constant", text): text for text in constants}
    answers |= {("constant", each.name): each.text for each in shapes(right)}
    return answers | {("copy", each.name): each.text for each in copies(task.question)}


def _best(passed: Mapping[_Name, Sequence[bool]], half: int, kind: str) -> tuple[str, float]:
    """The answer of a kind that passes most of the first half, and its rate on the second."""
    best = max((name for name in passed if name[0] == kind), key=lambda name: (sum(passed[name][:half]), name), default=None)
    if best is None:
        return "", 0.0
    rest = passed[best][half:]
    return best[1], round(sum(rest) / len(rest), 4)


def _tasks(source: TaskSpec, questions: int) -> list[Task]:
    """Twice as many; items that cannot be made are passed over, as a generator does."""
    tasks: list[Task] = []
    try:
        size = dataset_size(source.dataset, source.canonical_config)
    except TaskError as error:
        raise SpecError(f"{source.dataset}: cannot be screened: {error}") from None
    for place in range(_PATIENCE * questions):
        ref = TaskRef(dataset=source.dataset, config=source.canonical_config, seed=SEED + place // size * size, index=place % size)
        # reasoning-gym's bf compiler prints a dot for every program.
        with suppress(TaskError), redirect_stdout(io.StringIO()):
            tasks.append(derive_task(ref))
        if len(tasks) == 2 * questions:
            return tasks
    raise SpecError(f"{source.dataset}: cannot be screened: of {_PATIENCE * questions} items {len(tasks)} can be made")

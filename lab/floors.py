"""Measures what answers without any skill earn on an experiment's datasets: a constant answer, or a
copy from the question.

If one constant answer passes a tenth of a dataset's questions, a gain on that dataset may only mean
that the constant was learned. Such a dataset is `out` (excluded): reports give the gain both with
and without it.

The best answer of each kind is chosen on one half of the questions and measured on the other half,
because the best of a hundred looks too good on the questions that it was chosen by.
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
from shared.atomic_files import replace_text
from shared.config import TaskSpec
from shared.contracts.messages import Task
from shared.tasks.audit.candidates import CONSTANTS, copies, right_answers, shapes
from shared.tasks.derive import TaskError, dataset_size, derive_task, task_ref
from shared.tasks.evaluation import PASS_REWARD
from shared.tasks.sandbox import ScorerPool, ScoringJob

FLOORS_FILE = "floors.json"
OUT_FROM = 0.1
"""A dataset is excluded if a constant's pass rate is at least this."""
QUESTIONS = 200
SEED = 0x7D000000
"""No node trains or is evaluated on these questions."""
_OTHERS_ANSWERS = 60
"""How many of the most frequent answers to other questions are tried as constants."""
_MOST_ANSWERS = 40
_PATIENCE = 4
_ANSWER_TIMEOUT_S = 20.0

_Name = tuple[str, str]
"""The kind (constant or copy) and the answer's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """One source. constant, copy: the best answer of the kind; their rates are the fraction of
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
    """The floors of each source, in order; a dataset that appears twice with the same config is
    screened once.

    `questions`: the number of questions that choose the best answers; as many others measure their
    rates.

    Raises: SpecError: at least half of a source's items cannot be made.
    """
    distinct = {(source.dataset, source.canonical_config): source for source in sources}
    return [await _floor(pool, source, questions) for source in distinct.values()]


def sources_of(sources: Sequence[Sequence[TaskSpec]]) -> list[TaskSpec]:
    """Every source that any arm's nodes use, once each."""
    return list({source.model_dump_json(): source for each in sources for source in each}.values())


def scorers(sources: Sequence[TaskSpec]) -> ScorerPool:
    """A pool that scores like the experiment's nodes."""
    return ScorerPool(workers=os.cpu_count() or 1, answer_timeout_s=_ANSWER_TIMEOUT_S, memory_mb=2048, tasks=sources)


def write_floors(out: Path, floors: Sequence[Floor]) -> Path:
    """Write the floors next to the records, for reports."""
    file = out / FLOORS_FILE
    replace_text(file, json.dumps([asdict(floor) for floor in floors], indent=1, ensure_ascii=False) + "\n")
    return file


def read_floors(results: Path) -> list[Floor] | None:
    """Read what `write_floors` wrote; None if the experiment was not screened.

    Raises: SpecError: the file does not hold such a list.
    """
    file = results / FLOORS_FILE
    if not file.is_file():
        return None
    try:
        return [Floor(**each) for each in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise SpecError(f"{file}: cannot be read ({error}); remove it and run `swarm experiment screen`") from None


def out_datasets(floors: Sequence[Floor]) -> frozenset[str]:
    """Names of the datasets that are excluded because of any of their configs."""
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
            passed[name][place] = (reward or 0.0) >= PASS_REWARD
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
    """Candidate answers by kind and name. Only the shape of the right answer is used."""
    answers = {("constant", text): text for text in constants}
    answers |= {("constant", each.name): each.text for each in shapes(right)}
    return answers | {("copy", each.name): each.text for each in copies(task.text)}


def _best(passed: Mapping[_Name, Sequence[bool]], half: int, kind: str) -> tuple[str, float]:
    """The answer of a kind that passes most questions of the first half, and its rate on the second
    half.
    """
    best = max((name for name in passed if name[0] == kind), key=lambda name: (sum(passed[name][:half]), name), default=None)
    if best is None:
        return "", 0.0
    rest = passed[best][half:]
    return best[1], round(sum(rest) / len(rest), 4)


def _tasks(source: TaskSpec, questions: int) -> list[Task]:
    """Twice as many tasks; items that cannot be made are skipped, as a generator does."""
    tasks: list[Task] = []
    try:
        size = dataset_size(source.dataset, source.canonical_config)
    except TaskError as error:
        raise SpecError(f"{source.dataset}: cannot be screened: {error}") from None
    for place in range(_PATIENCE * questions):
        ref = task_ref(source.dataset, source.canonical_config, seed=SEED + place // size * size, index=place % size)
        # reasoning-gym's bf compiler prints a dot for every program.
        with suppress(TaskError), redirect_stdout(io.StringIO()):
            tasks.append(derive_task(ref))
        if len(tasks) == 2 * questions:
            return tasks
    raise SpecError(f"{source.dataset}: cannot be screened: only {len(tasks)} of {_PATIENCE * questions} items can be made")


_MOST_CHARS = 40


def floors_table(floors: Sequence[Floor]) -> str:
    """Markdown with one row per source."""
    lines = [
        f"| dataset | best constant | pass rate | best copy | pass rate | out ({OUT_FROM:g} or more) |",
        "|---|---|---|---|---|---|",
        *(
            f"| {floor.dataset} | {_shown(floor.constant)} | {floor.constant_rate:.3f} | {_shown(floor.copy)} | "
            f"{floor.copy_rate:.3f} | {'**out**' if floor.out else ''} |"
            for floor in floors
        ),
    ]
    return "\n".join(lines) + "\n"


def out_lines(floors: Sequence[Floor]) -> list[str]:
    """For a terminal: a sentence for each excluded dataset, or one saying that there is none."""
    found = [
        f"{floor.dataset} is out: the constant {_shown(floor.constant, table=False)} has a pass rate of {floor.constant_rate:.2f}; "
        "see the columns named screened"
        for floor in floors
        if floor.out
    ]
    return found or ["no dataset is out"]


def _shown(answer: str, *, table: bool = True) -> str:
    """Inline code on one line, with the characters escaped that have a meaning in a table."""
    text = answer if len(answer) <= _MOST_CHARS else answer[: _MOST_CHARS - 1] + "…"
    text = text.replace("\n", "\\n").replace("`", "'")
    return "`" + ((text.replace("|", "\\|") if table else text) or "(nothing)") + "`"

"""The held-out set: fixed tasks, the same on every node with the same sources, that never enter
training. Nor do those of the evaluation sets (`[[eval.sets]]`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from itertools import count as count_up
from typing import TYPE_CHECKING, Any

from shared.contracts.messages import Task
from shared.tasks.derive import TaskError, dataset_size, derive_task, task_ref
from shared.tasks.file_rows import FileRows, find_rows
from shared.tasks.prompt import text_key
from shared.tasks.reference_checks import is_left_out

if TYPE_CHECKING:
    from shared.config.task_sections import EvalSet, TaskSpec

HELD_OUT_SEED = 0x7E000000
"""Held-out tasks have seeds from here on; training seeds are smaller."""

DRAW_SEEDS = 100_000
"""Number of seeds from one held-out set to the next; there is room for 300 values of
`eval.draw`.
"""

PATIENCE = 200
"""A source that yields this many known tasks in a row is considered exhausted; its share of the
set stays smaller.
"""


class HeldOut:
    """The tasks that must not be trained on: held-out tasks and those of evaluation sets. A row of
    a file is also known by what it asks, whatever its form (`shared.tasks.file_rows.asked_of`).

    sets: the tasks that are asked of each set, by its name. files: those of the sets, of which all
    rows count.
    """

    def __init__(self, tasks: Iterable[Task], sets: Mapping[str, list[Task]] | None = None, files: Iterable[FileRows] = ()) -> None:
        self.tasks = list(tasks)
        self.sets = dict(sets or {})
        self._of_sets = frozenset(
            chain(
                (key for rows in files for keys in _row_keys(rows) for key in keys),
                (key for asked in self.sets.values() for task in asked for key in _keys(task)),
            )
        )
        self._keys = self._of_sets.union(key for task in self.tasks for key in _keys(task))

    def contains(self, task: Task) -> bool:
        return not self._keys.isdisjoint(_keys(task))

    def contains_text(self, question: str) -> bool:
        """Check a question that its text identifies."""
        return text_key(question) in self._keys

    def contains_all(self, rows: FileRows) -> bool:
        return not any(self._keys.isdisjoint(keys) for keys in _row_keys(rows))

    def rows_of_sets(self, specs: Iterable[TaskSpec]) -> int:
        """Count the rows of these sources' files that an evaluation set has too."""
        if not self._of_sets:
            return 0
        files = [rows for name in {spec.dataset for spec in specs} if (rows := find_rows(name)) is not None]
        return sum(not self._of_sets.isdisjoint(keys) for rows in files for keys in _row_keys(rows))


def held_out_of(specs: Sequence[TaskSpec], *, tasks: int, sets: Sequence[EvalSet], draw: int = 0) -> HeldOut:
    """The tasks that nodes with these sources and this evaluation never train on: `eval.tasks`,
    `eval.sets` and `eval.draw`. All files are read (`shared.tasks.specs.checked_config`).

    Raises:
        TaskError: as `held_out_tasks`, or nothing is left to train on.
    """
    files = [rows for each in sets if (rows := find_rows(each.dataset)) is not None]
    held = HeldOut(held_out_tasks(specs, tasks, draw=draw), {each.name: set_tasks(each) for each in sets}, files)
    for spec in specs if sets else ():
        rows = find_rows(spec.dataset)
        if rows is not None and held.contains_all(rows):
            raise TaskError(
                "task_config",
                f"{spec.path}: all of its questions are in [[eval.sets]] or held out (eval.tasks {tasks}), so none is left "
                "to train on: give the sets other questions",
            )
    return held


def set_tasks(spec: EvalSet) -> list[Task]:
    """The tasks that an evaluation set asks: of a file at most `questions` rows, the same for the
    same rows.
    """
    return held_out_tasks([spec], spec.questions)


def _row_keys(rows: FileRows) -> Iterator[tuple[str | int, ...]]:
    return ((text_key(rows.question_bytes(index).decode()), *rows.asked(index)) for index in range(len(rows)))


def _keys(task: Task) -> tuple[str | int, ...]:
    rows = find_rows(task.ref.dataset)
    return (task.key, *(rows.asked(task.ref.index) if rows is not None else ()))


def held_out_tasks(specs: Sequence[TaskSpec], n: int, *, draw: int = 0) -> list[Task]:
    """At most `n` tasks with distinct keys, split over `specs` by weight (largest remainder).
    Deterministic.

    A source with too few distinct tasks contributes fewer, and items that cannot be derived, or
    whose reference answer earns nothing, are skipped. The order is that of `specs`. Each `draw` is
    another set.

    Raises:
        TaskError: a dataset cannot be used, or none of its first `PATIENCE` items can be derived.
    """
    chosen: list[Task] = []
    known: set[str] = set()
    first_seed = HELD_OUT_SEED + draw * DRAW_SEEDS
    for spec, count in zip(specs, shares(specs, n), strict=True):
        size = dataset_size(spec.dataset, spec.canonical_config) if count else 1
        taken = misses = 0
        places = _places(spec, size, draw)
        while taken < count and misses < PATIENCE and (place := next(places, None)) is not None:
            block, index = place
            ref = task_ref(spec.dataset, spec.canonical_config, seed=first_seed + block * size, index=index)
            try:
                task = derive_task(ref)
            except TaskError as error:
                misses += 1
                if not error.only_this_item or (misses == PATIENCE and not taken):
                    raise
                continue
            if task.key in known or is_left_out(spec, ref):
                misses += 1
                continue
            known.add(task.key)
            chosen.append(task)
            taken += 1
            misses = 0
    return chosen


def held_out_id(tasks: Sequence[Task]) -> str:
    """SHA-256 (hex) of the tasks, in any order. Nodes with equal ids were asked the same questions;
    `shared.config.scorers_id` says whether the answers were scored alike, also where another reward
    gets other columns of a file.
    """
    return hashlib.sha256(json.dumps(sorted(_asked(tasks))).encode()).hexdigest()


def held_out_order(tasks: Sequence[Task]) -> list[int]:
    """Indexes of the tasks in an order that is the same wherever `held_out_id` is."""
    asked = _asked(tasks)
    return sorted(range(len(tasks)), key=asked.__getitem__)


def _asked(tasks: Sequence[Task]) -> list[tuple[Any, ...]]:
    names = {name: rows.questions_name for name in {task.ref.dataset for task in tasks} if (rows := find_rows(name)) is not None}
    return [
        (names.get(ref.dataset, ref.dataset), ref.config, ref.seed, ref.index, task.text, task.answer or "", task.metadata)
        for task in tasks
        for ref in [task.ref]
    ]


def check_share(spec: TaskSpec, count: int, unread: int = 0) -> None:
    """Check that a file has enough questions to set `count` of them aside for evaluation.
    `unread`: number of its rows that have mistakes and may become further questions.

    Raises:
        TaskError: it has fewer than twice as many.
    """
    rows = find_rows(spec.dataset)
    if rows is not None and 2 * count > (distinct := rows.distinct_questions() + unread):
        questions = "one question" if distinct == 1 else f"{distinct} different questions"
        held_out = f"{count} of them would" if count < distinct else "all would" if distinct > 1 else "it would"
        left = max(0, distinct - count) or "none"
        lower = "lower eval.tasks until at most half is held out"
        if distinct == 1:
            lower = "set eval.tasks = 0 to train without evaluating"
        raise TaskError(
            "task_config",
            f"{spec.path}: it has {questions}, and {held_out} be held out for evaluation, which leaves {left} to train on: "
            f"{lower}, or add rows",
        )


def shares(specs: Sequence[TaskSpec], n: int) -> list[int]:
    """Divide `n` held-out tasks among the sources, by weight (largest remainder)."""
    weights = [spec.weight for spec in specs]
    total = sum(weights)
    exact = [n * weight / total for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for position in by_remainder[: n - sum(counts)]:
        counts[position] += 1
    return counts


def _places(spec: TaskSpec, size: int, draw: int) -> Iterator[tuple[int, int]]:
    """Where to look for a source's held-out items: (block of `size` seeds, index)."""
    rows = find_rows(spec.dataset)
    if rows is not None:
        # In the order of their hashes, because a file may be sorted by difficulty.
        yield from ((0, index) for index in rows.shuffled(draw))
        return
    # reasoning-gym seeds item i with seed + i: blocks of `size` seeds do not overlap.
    yield from (divmod(position, size) for position in count_up())

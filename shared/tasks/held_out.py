"""The held-out set: fixed tasks, the same on every node with the same sources, that never enter
training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count as count_up
from typing import TYPE_CHECKING

from shared.contracts.messages import Task
from shared.tasks.derive import TaskError, dataset_size, derive_task, task_ref
from shared.tasks.file_rows import find_rows
from shared.tasks.reference_checks import is_left_out

if TYPE_CHECKING:
    from shared.config.sections import TaskSpec

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
    """The tasks that must not be trained on, by their keys."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = list(tasks)
        self._keys = frozenset(task.key for task in self.tasks)

    def contains(self, key: str) -> bool:
        return key in self._keys


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
    `shared.config.scorers_id` says whether the answers were scored alike.
    """
    asked = sorted(
        (task.ref.dataset, task.ref.config, task.ref.seed, task.ref.index, task.text, task.answer or "", task.metadata)
        for task in tasks
    )
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


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

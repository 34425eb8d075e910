"""Checks a node's task sources once, at the start, instead of failing at the first draw that uses
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.contracts.messages import TaskRef
from shared.tasks.derive import TaskConfigError, TaskError, dataset_size, derive_item
from shared.tasks.held_out import check_share, shares
from shared.tasks.verifiers import DEFAULT_VERIFIER, load_verifier

if TYPE_CHECKING:
    from shared.config import TaskSpec


FILE_ROWS_CHECKED = 1000
"""Number of rows, spread over a file, whose answers are shown to the verifier at the start. An
answer that the verifier cannot judge would otherwise fail groups later.
"""


def check_specs(specs: Sequence[TaskSpec], held_out: int = 0) -> None:
    """Derive one item of each source, or many of a file, and let its verifier accept it.

    `held_out`: number of questions that evaluation takes; a file must have at least as many left
    for training.

    Raises:
        TaskConfigError: with one line per unusable source that names the dataset, the config key if
            there is one, the cause and the remedy.
    """
    problems = []
    reason = "task_config"
    for position, (spec, share) in enumerate(zip(specs, shares(specs, held_out), strict=True)):
        try:
            size = dataset_size(spec.dataset, spec.canonical_config)
            if spec.source == "file":
                _check_file(spec, size)
                check_share(spec, share)
                continue
            item = derive_item(TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=0))
            if spec.verifier != DEFAULT_VERIFIER:
                load_verifier(spec.verifier)(item)
        except TaskError as error:
            reason = error.reason
            problems.append(f"  tasks[{position}] {error}")
    if problems:
        raise TaskConfigError(reason, "task sources cannot be used:\n" + "\n".join(problems))


def _check_file(spec: TaskSpec, size: int) -> None:
    verifier = load_verifier(spec.verifier)
    for number in range(min(size, FILE_ROWS_CHECKED)):
        index = number * size // min(size, FILE_ROWS_CHECKED)
        try:
            verifier(derive_item(TaskRef(dataset=spec.dataset, seed=1, index=index)))
        except TaskError as error:
            raise TaskError(error.reason, f"{spec.path}: row {index + 1}: {error}") from None

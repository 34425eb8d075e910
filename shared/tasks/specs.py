"""Check a node's task sources once, at the start, instead of failing at the first draw that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.contracts.messages import TaskRef
from shared.tasks.derive import TaskConfigError, TaskError, dataset_size, derive_item
from shared.tasks.verifiers import DEFAULT_VERIFIER, load_verifier

if TYPE_CHECKING:
    from shared.config import TaskSpec


def check_specs(specs: Sequence[TaskSpec]) -> None:
    """Make one item of each source, and let its verifier look at it.

    Raises:
        TaskConfigError: with one line per unusable source that names the dataset, the config key where there is one, the cause and
            the remedy.
    """
    problems = []
    reason = "task_config"
    for position, spec in enumerate(specs):
        try:
            dataset_size(spec.dataset, spec.canonical_config)
            item = derive_item(TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=0))
            if spec.verifier != DEFAULT_VERIFIER:
                load_verifier(spec.verifier)(item)
        except TaskError as error:
            reason = error.reason
            problems.append(f"  tasks[{position}] {error}")
    if problems:
        raise TaskConfigError(reason, "task sources cannot be used:\n" + "\n".join(problems))

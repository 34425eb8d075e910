"""Checks a spec before anything runs: nodes' settings, datasets, model folders."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from lab.arms import plan_run
from lab.spec import Spec, SpecError
from shared.config.model_section import ModelSection
from shared.tasks.derive import TaskError, dataset_size

ModelProblem = Callable[[ModelSection], str | None]
"""Returns what is wrong with a model; None if nothing is."""


def check_spec(spec: Spec, model_problem: ModelProblem) -> None:
    """Check the settings, datasets and models of every arm.

    Raises: SpecError: of the first arm with a mistake.
    """
    check_datasets(spec)
    problem_of = cache(lambda path, revision: model_problem(ModelSection(path=path, revision=revision)))
    for name in spec.arms:
        for node in plan_run(spec, name, spec.seeds[0]).nodes:
            if problem := problem_of(node.config.model.path, node.config.model.revision):
                raise SpecError(f"arm {name}: {problem}")


def check_datasets(spec: Spec) -> None:
    """Check only the datasets.

    Raises: SpecError: a dataset is unknown, or refuses its config.
    """
    size_of = cache(dataset_size)
    for name, arm in spec.arms.items():
        for task in [*arm.tasks, *(task for group in arm.nodes for task in group.tasks or ())]:
            try:
                size_of(task.dataset, task.canonical_config)
            except TaskError as error:
                raise SpecError(f"arm {name}: tasks: {error}") from None

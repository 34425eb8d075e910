"""Checks a spec before anything runs: nodes' settings, datasets, model folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from lab.arms import in_group, plan_run
from lab.mistakes import Field, Mistake, told
from lab.spec import Arm, Spec, SpecError
from shared.config import TaskSpec
from shared.config.model_section import ModelSection
from shared.tasks.derive import TaskError, dataset_size

ModelProblem = Callable[[ModelSection], str | None]
"""Returns what is wrong with a model; None if nothing is."""


def check_spec(spec: Spec, model_problem: ModelProblem) -> None:
    """Check the settings, datasets and models of every arm.

    Raises: SpecError: naming each mistake once, at its place in the spec.
    """
    mistakes = dataset_mistakes(spec)
    problem_of = cache(lambda path, revision: model_problem(ModelSection(path=path, revision=revision)))
    for name in spec.arms:
        try:
            run = plan_run(spec, name, spec.seeds[0])
        except SpecError as error:
            mistakes += error.mistakes
            continue
        places = [place for place, group in enumerate(spec.arms[name].nodes) for _ in range(group.count)]
        for place, node in zip(places, run.nodes, strict=True):
            if problem := problem_of(node.config.model.path, node.config.model.revision):
                field = in_group(spec.arms[name].nodes[place].overrides, place, ("model", "path"))
                mistakes.append(Mistake(name, field, problem))
    if mistakes:
        raise SpecError(f"spec {spec.name} cannot be used:\n" + "\n".join(told(mistakes, spec.source)))


def check_datasets(spec: Spec) -> None:
    """Check only the datasets.

    Raises: SpecError: a dataset is unknown, or refuses its config.
    """
    if mistakes := dataset_mistakes(spec):
        raise SpecError(f"spec {spec.name} cannot be used:\n" + "\n".join(told(mistakes, spec.source)))


def dataset_mistakes(spec: Spec) -> list[Mistake]:
    """The problems in all arms' sources: datasets that reasoning-gym does not have, or configs that
    it refuses.
    """
    problem_of = cache(_dataset_problem)
    return [
        Mistake(name, field, problem)
        for name, arm in spec.arms.items()
        for field, task in _sources(arm)
        if (problem := problem_of(task.dataset, task.canonical_config))
    ]


def _sources(arm: Arm) -> Iterator[tuple[Field, TaskSpec]]:
    for place, task in enumerate(arm.tasks):
        yield ("tasks", place), task
    for number, group in enumerate(arm.nodes):
        for place, task in enumerate(group.tasks or ()):
            yield ("nodes", number, "tasks", place), task


def _dataset_problem(dataset: str, config: str) -> str | None:
    try:
        dataset_size(dataset, config)
    except TaskError as error:
        return str(error)
    return None

"""`swarm task list` and `swarm task show`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shared.messages import TaskRef
from swarm_cli.errors import CommandError

task_app = typer.Typer(name="task", help="Look at the tasks that policies are trained and evaluated on.", no_args_is_help=True)


@task_app.command("list")
def list_tasks(contains: Annotated[str, typer.Argument(help="Only names that contain this.")] = "") -> None:
    """Print the names of all datasets."""
    from shared.tasks.derive import dataset_names

    names = [name for name in dataset_names() if contains in name]
    if not names:
        raise CommandError(f"no dataset's name contains {contains!r}: `swarm task list` shows all")
    for name in names:
        typer.echo(name)


@task_app.command()
def show(
    dataset: Annotated[str, typer.Argument(help="The dataset's name.")],
    config: Annotated[str, typer.Option(help="The dataset's settings as JSON, e.g. '{\"max_terms\": 3}'.")] = "{}",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    index: Annotated[int, typer.Option(min=0, help="First task.")] = 0,
    count: Annotated[int, typer.Option(min=1, max=1000)] = 3,
) -> None:
    """Print tasks of a dataset: question and reference answer."""
    from shared.tasks.derive import TaskError, derive_task

    canonical = _canonical(config)
    for position in range(index, index + count):
        try:
            task = derive_task(TaskRef(dataset=dataset, config=canonical, seed=seed, index=position))
        except TaskError as error:
            raise CommandError(str(error)) from None
        typer.echo(f"--- {dataset} seed {seed} index {position}")
        typer.echo(task.question)
        typer.echo(f"reference answer: {task.answer if task.answer is not None else '(none; any right answer scores)'}")


def _canonical(config: str) -> str:
    try:
        settings = json.loads(config)
    except ValueError as error:
        raise CommandError(f"--config is not JSON ({error}): write it like '{{\"max_terms\": 3}}'") from None
    if not isinstance(settings, dict):
        raise CommandError("--config must be a JSON object, like '{\"max_terms\": 3}'")
    return json.dumps(settings, sort_keys=True, separators=(",", ":"))

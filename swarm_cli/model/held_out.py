"""Which tasks `swarm eval` asks, and how many of them a node may have trained on: those that it did
not hold out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config import NodeConfig, TaskSpec
from shared.contracts.messages import Task
from shared.run_records import EVAL_FILE, read_jsonl
from shared.tasks import HeldOut, TaskConfigError, check_specs, held_out_tasks
from shared.tasks.held_out import held_out_id
from swarm_cli.errors import CommandError

MOST_TASKS = 100_000
Fits = Callable[[Task], bool]
"""Whether a task's prompt leaves room for an answer."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A node's held-out set as its evaluations name it. held_out: its id; None in records of
    earlier versions. changed: an earlier evaluation names another one.
    """

    n: int
    held_out: str | None
    changed: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """sources: with their files read. not_held_out: how many of the tasks may have been trained on;
    None: not known. note: a sentence about that; empty if all are held out.
    """

    sources: list[TaskSpec]
    tasks: list[Task]
    not_held_out: int | None
    note: str


def recorded_set(model: Path) -> Recorded | None:
    """The set of the newest evaluation, if `model` is a node's folder in a run, or one of its
    checkpoints, and the node has been evaluated.
    """
    node = model.parent.parent if (model / "manifest.json").is_file() else model
    lines = read_jsonl(node / EVAL_FILE) if (node / "checkpoints").is_dir() else []
    sets = [found for line in lines if (found := _set(line.get("n"), line.get("held_out")))]
    return Recorded(*sets[-1], changed=len(set(sets)) > 1) if sets else None


def _set(n: Any, held_out: Any) -> tuple[int, str | None] | None:
    known = isinstance(n, int) and 0 < n <= MOST_TASKS
    return (n, held_out if isinstance(held_out, str) else None) if known else None


def asked_tasks(config: NodeConfig, sources: Sequence[TaskSpec], n: int | None, recorded: Recorded | None, fits: Fits) -> Asked:
    """The held-out tasks of `sources` that fit the model: `n` of them, or as many as are held out,
    by the node whose record is given, else by `eval.tasks`.

    Raises:
        CommandError: a source cannot be used, nothing is held out and `n` is None, or no task fits.
    """
    with _told():
        read = check_specs(sources)
        if recorded:
            found = _held_of_run(config, sources, recorded, fits)
            size, held = found or (recorded.n, None)
        else:
            size, held = config.eval.tasks, HeldOut(_tasks(read, config.eval.tasks, config))
        if not (count := n or size):
            raise CommandError("eval.tasks is 0, so no task is held out: say with --n how many to ask")
        drawn = _tasks(read, count, config)
    tasks = [task for task in drawn if fits(task)]
    if not tasks:
        raise CommandError(
            f"none of the {len(drawn)} tasks leaves room for an answer of generator.max_new_tokens "
            f"{config.generator.max_new_tokens}: lower that, or choose tasks with shorter questions"
        )
    beyond = None if held is None else sum(not held.contains(task.question) for task in tasks)
    return Asked(read, tasks, beyond, _note(beyond, len(tasks), len(held.tasks) if held else 0, recorded))


def _held_of_run(config: NodeConfig, sources: Sequence[TaskSpec], recorded: Recorded, fits: Fits) -> tuple[int, HeldOut] | None:
    """The set that the node's record names, with the number of tasks that gives it, if the
    configuration's sources, or those asked for, give it with `eval.tasks` or the recorded number.
    Its id is that of the tasks that fit. None: they do not, or the node did not always have it.
    """
    if recorded.changed:
        return None
    for specs in (config.tasks, sources) if config.tasks != sources else (sources,):
        with contextlib.suppress(TaskConfigError):  # such as a file that is not there any more
            read = check_specs(specs)
            for size in dict.fromkeys((config.eval.tasks, recorded.n)):
                tasks = _tasks(read, size, config)
                fitting = [task for task in tasks if fits(task)]
                if recorded.held_out in (None, held_out_id(fitting, read)) and len(fitting) == recorded.n:
                    return size, HeldOut(tasks)
    return None


def _note(beyond: int | None, asked: int, held: int, recorded: Recorded | None) -> str:
    """Whose set it is not, as the remedies differ; `held` tasks are in that set."""
    if beyond is None and recorded and recorded.changed:
        return "the node's held-out set changed during its run, so it may have trained on some of these tasks"
    if beyond is None:
        return (
            "the node's record names another held-out set, so it may have trained on some of these tasks: give the configuration "
            "that it ran with (--config, and its environment variables), without --tasks"
        )
    if not beyond:
        return ""
    them = "it" if beyond == 1 else "them"
    those = f"{beyond} of these {asked} tasks {'is' if beyond == 1 else 'are'} not among the {held} that"
    if recorded:
        return f"{those} the node held out: it may have trained on {them}"
    return f"{those} eval.tasks holds out: a node with this configuration may train on {them}"


def _tasks(specs: Sequence[TaskSpec], n: int, config: NodeConfig) -> list[Task]:
    return held_out_tasks(specs, n, draw=config.eval.draw)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Some datasets print while they derive a task (`bf` does). Standard output is for the
    report.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except TaskConfigError as error:
        raise CommandError(str(error)) from None

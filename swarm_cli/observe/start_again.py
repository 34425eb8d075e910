"""Which command starts a process again that does not answer, for a run of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from shared.contracts.wire import is_node_name
from swarm_cli.looking.target import Target, run_here
from swarm_cli.observe.standing import gone, late_with_word
from swarm_cli.observe.view import NodeView
from swarm_cli.restart_command import restart_options, starts_again

MOST = 3


def unanswered(views: Iterable[NodeView], now: float) -> list[str]:
    """The processes that do not answer, as `swarm restart` calls them. Those of a node that is
    still starting are not among them.
    """
    found = []
    for view in views:
        away = [] if view.step == 0 or view.loading(now) else gone(view, now)
        if is_node_name(view.node):  # it comes from the server, and is printed in a command
            found += [f"{view.node}-{role}" for role in (*away, *late_with_word(view, now))]
    return found


def remedies(processes: Sequence[str], run: Path | None, most: int = MOST) -> list[str]:
    """A line for each process, the first `most` of them. run: as `folder_here` returns."""
    if run is None or not processes:
        return []
    options = restart_options(run)
    lines = [starts_again(name, options) for name in processes[:most]]
    more = len(processes) - most
    return [*lines[:-1], f"{lines[-1]}; {more} more do not answer"] if more > 0 else lines


def folder_here(var_dir: Path, target: Target) -> Path | None:
    """The folder of the run that is looked at; None if that is no running run of this machine."""
    run = run_here(var_dir, target)
    return var_dir / "runs" / run if run else None

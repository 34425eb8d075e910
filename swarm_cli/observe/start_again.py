"""Which command starts a process again that does not answer, for a run of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from shared.contracts.wire import is_node_name
from swarm_cli.elsewhere import VAR_DIR_VARIABLE
from swarm_cli.looking.target import Target, run_here
from swarm_cli.observe.plot import DEFAULT_VAR_DIR
from swarm_cli.observe.standing import gone, late_with_word
from swarm_cli.observe.view import NodeView
from swarm_cli.running import running_runs

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


def remedies(processes: Sequence[str], options: str | None, most: int = MOST) -> list[str]:
    """A line for each process, the first `most` of them. options: as `restart_options` returns."""
    if options is None:
        return []
    lines = [f"`swarm restart {name}{options}` starts it again (with `--now` if it hangs)" for name in processes[:most]]
    more = len(processes) - most
    return [*lines[:-1], f"{lines[-1]}; {more} more do not answer"] if more > 0 else lines


def restart_options(var_dir: Path, target: Target) -> str | None:
    """What `swarm restart` needs besides the process: nothing, or the run's name if there are
    several or it is in another folder. None if what is looked at is no running run of this machine.
    """
    run = run_here(var_dir, target)
    if not run:
        return None
    found = [folder.resolve() for folder in running_runs(Path(os.environ.get(VAR_DIR_VARIABLE) or DEFAULT_VAR_DIR))]
    return "" if found == [(var_dir / "runs" / run).resolve()] else f" --run {run}"

"""What mends that processes do not answer, for a run of this machine: the command that starts each
again or, if they all wait for their server, what that needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from shared.contracts.wire import is_node_name
from shared.roles import ROLES
from shared.runtime.status import STATUS_INTERVAL_S, STOPPED
from swarm_cli.cannot_store import cannot_store, silent_together
from swarm_cli.looking.target import Target, run_here
from swarm_cli.observe.dying import dying, left, lines
from swarm_cli.observe.standing import QUIET_S, gone, late_with_word
from swarm_cli.observe.view import NodeView
from swarm_cli.restart_command import restart_options, starts_again

MOST = 3
TOGETHER_S = 3 * STATUS_INTERVAL_S
"""Processes that write every `STATUS_INTERVAL_S` fell silent at once if their last words are this
close.
"""


def unanswered(views: Iterable[NodeView], now: float) -> list[str]:
    """The processes that do not answer, as `swarm restart` calls them. Those of a node that is
    still starting are not among them.
    """
    found = []
    for view in views:
        away = gone(view, now)
        if is_node_name(view.node):  # it comes from the server, and is printed in a command
            found += [f"{view.node}-{role}" for role in (*away, *late_with_word(view, now))]
    return found


def advice(views: Sequence[NodeView], now: float, run: Path | None, most: int = MOST) -> list[str]:
    """A line for each process that its supervisor starts again and again, then `remedies` for the
    others that do not answer.
    """
    found = dying(views, now, run)
    return [*lines(found), *remedies(left(unanswered(views, now), found), run, most)]


def server_trouble(views: Sequence[NodeView], now: float, var_dir: Path, target: Target) -> str:
    """What is wrong with the server through which `views` were read, and its remedy, if that
    explains more than the processes' silence does; else empty. Asks the server, for two seconds at
    most.
    """
    if target.ended is not None:
        return ""
    if told := cannot_store(var_dir, target.node_url):
        return told
    return silent_together(var_dir, target.node_url) if all_silent(views, now) else ""


def all_silent(views: Iterable[NodeView], now: float) -> bool:
    """Whether no process of any node answers that has done so, and all fell silent within
    `TOGETHER_S`, none in order.
    """
    newest = [view.roles(role)[0] for view in views for role in ROLES if view.roles(role)]
    last = [status.updated_at for status in newest]
    late = all(status.state != STOPPED and now - status.updated_at > QUIET_S for status in newest)
    return late and len(last) >= len(ROLES) and max(last) - min(last) <= TOGETHER_S


def remedies(processes: Sequence[str], run: Path | None, most: int = MOST) -> list[str]:
    """A line for each process, the first `most` of them. run: as `folder_here` returns."""
    if run is None or not processes:
        return []
    options = restart_options(run)
    told = [starts_again(name, options) for name in processes[:most]]
    more = len(processes) - most
    return [*told[:-1], f"{told[-1]}; {more} more do not answer"] if more > 0 else told


def folder_here(var_dir: Path, target: Target) -> Path | None:
    """The folder of the run that is looked at; None if that is no running run of this machine."""
    run = run_here(var_dir, target)
    return var_dir / "runs" / run if run else None

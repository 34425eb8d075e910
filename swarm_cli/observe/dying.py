"""What is said of a process of this machine that dies again and again: how often, what follows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shared.contracts.wire import is_node_name
from shared.roles import ROLES
from shared.runtime.deaths import Deaths, deaths_file, read_deaths
from shared.runtime.errors import EXIT_CONFIG
from shared.runtime.supervise import CRASH_WINDOW_S
from swarm_cli.observe.standing import QUIET_S, START_AGAIN_S, duration
from swarm_cli.observe.view import NodeView

OFTEN = 3
"""A process that answers is told of only if it died this often within `CRASH_WINDOW_S`, and for
`START_AGAIN_S` after its last start.
"""


class Dying(NamedTuple):
    """What is known of a process that died lately. given_up: its supervisor no longer starts it."""

    words: str
    given_up: bool


def dying(views: Iterable[NodeView], now: float, run: Path | None) -> dict[str, Dying]:
    """What is known of each process that died lately, by its name: `killed 5 times in 100 s,
    starting again in 10 s`. run: as `folder_here` returns; without it nothing is known.
    """
    if run is None:
        return {}
    found = {}
    for view in views:
        for role in ROLES if is_node_name(view.node) else ():
            process = f"{view.node}-{role}"
            deaths = read_deaths(deaths_file(run, process))
            answers = any(now - status.updated_at <= QUIET_S for status in view.alive(role, now))
            if deaths is not None and (words := told(deaths, now, answers=answers)):
                found[process] = Dying(words, deaths.next_at is None)
    return found


def told(deaths: Deaths, now: float, *, answers: bool) -> str:
    """The deaths in words; empty if they are past. answers: whether the process does."""
    newest = deaths.times[-1]
    if deaths.code == EXIT_CONFIG and deaths.next_at is None:
        return "" if answers else f"given up, it cannot go on: {deaths.why or 'its log says why'}"
    recent = [at for at in deaths.times if newest - CRASH_WINDOW_S <= at]
    past = deaths.next_at is not None and now - newest > CRASH_WINDOW_S
    stays = deaths.next_at is None or len(recent) < OFTEN or now - deaths.next_at > START_AGAIN_S
    if past or (answers and stays):
        return ""
    how = "killed" if deaths.code < 0 else "crashed"
    often = f"{how} {len(recent)} times in {max(1, round(newest - recent[0]))} s" if len(recent) > 1 else f"{how} once"
    if deaths.next_at is None:
        return f"{often}, given up"
    if deaths.next_at > now:
        return f"{often}, starting again in {max(1, round(deaths.next_at - now))} s"
    return f"{often}, started again {duration(now - deaths.next_at)} ago"


def lines(found: dict[str, Dying]) -> list[str]:
    """A line for each process of `dying`."""
    return [f"{process}: {each.words}" for process, each in found.items()]


def left(unanswered: Iterable[str], found: dict[str, Dying]) -> list[str]:
    """The processes that somebody must start again: not those whose supervisor does."""
    return [name for name in unanswered if name not in found or found[name].given_up]

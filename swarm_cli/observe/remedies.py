"""Finds what is wrong with a run of this machine, and the command that mends it: processes that die
again and again, that do not answer, or that all wait for their server. Lists what to do with a run
that has ended.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shared.contracts.status_figures import STATUS_INTERVAL_S, STOPPED
from shared.contracts.streams import names_of
from shared.contracts.wire import is_node_name
from shared.runtime.exits import CRASH_WINDOW_S, EXIT_CONFIG, Deaths, deaths_file, read_deaths
from shared.text import visible
from swarm_cli.observe.node_state import QUIET_S, START_AGAIN_S, NodeState, duration
from swarm_cli.observe.run_files import Evaluation, compared, read_evaluations
from swarm_cli.runs import goes_on, restart_options, starts_again
from swarm_cli.server_diagnosis import cannot_store, silent_together
from swarm_cli.target import Target, run_here

OFTEN = 3
"""A process that answers is told of only if it died this often within `CRASH_WINDOW_S`, and for
`START_AGAIN_S` after its last start.
"""
MOST = 3
TOGETHER_S = 3 * STATUS_INTERVAL_S
"""Processes that write every `STATUS_INTERVAL_S` fell silent at once if their last words are this
close.
"""


class Deceased(NamedTuple):
    """A process that died lately. given_up: its supervisor no longer starts it."""

    words: str
    given_up: bool


def dying(nodes: Iterable[NodeState], run: Path | None) -> dict[str, Deceased]:
    """The processes that died lately, by name, each in words such as `killed 5 times in 100 s,
    starting again in 10 s`. run: as `folder_here` returns; without it nothing is known.
    """
    if run is None:
        return {}
    found = {}
    for node in nodes:
        for role in node.needed if is_node_name(node.node) else ():
            process = f"{node.node}-{role}"
            deaths = read_deaths(deaths_file(run, process))
            answers = any(node.at - status.updated_at <= QUIET_S for status in node.alive(role))
            if deaths is not None and (words := death_words(deaths, node.at, answers=answers)):
                found[process] = Deceased(words, deaths.next_at is None)
    return found


def death_words(deaths: Deaths, now: float, *, answers: bool) -> str:
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


def unanswered(nodes: Iterable[NodeState]) -> list[str]:
    """The processes that do not answer, as `swarm restart` calls them. Those of a node that is
    still starting are not among them.
    """
    named = [node for node in nodes if is_node_name(node.node)]  # it comes from the server, and is printed in a command
    return [f"{node.node}-{role}" for node in named for role in (*node.gone, *node.late)]


def advice(nodes: Sequence[NodeState], run: Path | None, most: int = MOST) -> list[str]:
    """A line for each process that its supervisor starts again and again, then `remedies` for the
    others that do not answer. run: as `folder_here` returns.
    """
    found = dying(nodes, run)
    left = [name for name in unanswered(nodes) if name not in found or found[name].given_up]
    return [*(f"{process}: {each.words}" for process, each in found.items()), *remedies(left, run, most)]


def remedies(processes: Sequence[str], run: Path | None, most: int = MOST) -> list[str]:
    """A line for each process, the first `most` of them, with the command that starts it again."""
    if run is None or not processes:
        return []
    options = restart_options(run)
    told = [starts_again(name, options) for name in processes[:most]]
    more = len(processes) - most
    return [*told[:-1], f"{told[-1]}; {more} more do not answer"] if more > 0 else told


def server_trouble(nodes: Sequence[NodeState], var_dir: Path, target: Target) -> str:
    """Describe what is wrong with the server through which `nodes` were read, and its remedy, if
    that explains more than the processes' silence does; else empty. Asks the server, for two
    seconds at most.
    """
    if target.ended is not None:
        return ""
    if emptied := [node for node in nodes if node.lost]:
        return _restoring(emptied, target.node_url)
    return cannot_store(var_dir, target.node_url) or (silent_together(var_dir, target.node_url) if all_silent(nodes) else "")


def _restoring(emptied: Sequence[NodeState], node_url: str) -> str:
    """Explain which nodes' streams the server no longer has, and how they are restored."""
    names = ", ".join(visible(node.node, 40) for node in emptied[:MOST]) + (" and others" if len(emptied) > MOST else "")
    whole = all(len(node.lost) >= len(names_of(node.node)) for node in emptied)
    what = "came back with an empty store" if whole else "has lost streams"
    return (
        f"the NATS server at {visible(node_url, 200)} {what}: those of {names} are gone. Stop the run and restore them from a "
        "backup (`swarm nats restore`, docs/runbooks/SwarmStreamsLost.md); to go on without what they held, create them empty with "
        "`swarm nats init --plane node`"
    )


def all_silent(nodes: Iterable[NodeState]) -> bool:
    """Check whether every process that has answered is silent now, and all fell silent within
    `TOGETHER_S`, none in order.
    """
    newest = [(node.at, node.roles(role)[0]) for node in nodes for role in node.needed if node.roles(role)]
    last = [status.updated_at for _, status in newest]
    late = all(status.state != STOPPED and at - status.updated_at > QUIET_S for at, status in newest)
    return late and len(last) > 1 and max(last) - min(last) <= TOGETHER_S


def folder_here(var_dir: Path, target: Target) -> Path | None:
    """The folder of the run that is looked at; None if that is no running run of this machine."""
    run = run_here(var_dir, target)
    return var_dir / "runs" / run if run else None


def next_commands(run_dir: Path, node: str, where: str, *, complete: bool = False) -> list[tuple[str, str]]:
    """Commands for a run that has ended, each with what it does; of its nodes `node` counts. where:
    as `where_runs_are` returns. complete: as for `goes_on`.
    """
    run = shlex.quote(run_dir.name)
    best, policy = _export_of(read_evaluations(run_dir / node))
    return [
        (f"swarm dashboard --run {run}", "curves and answers in a browser"),
        (f"swarm eval {shlex.quote(str(run_dir / node))} --answers 3", "what the policy answers"),
        (f"swarm model export {run} {node} trained{best}{where}", policy),
        (f"swarm plot {run}{where}", "learning curves as a PNG"),
        (goes_on(run_dir, complete=complete), "continues training"),
    ]


def _export_of(evaluations: Sequence[Evaluation]) -> tuple[str, str]:
    """The option of `swarm model export` that fits these evaluations, and what is exported."""
    alike = compared(evaluations).alike
    trained = [each.score or 0.0 for each in alike if each.policy_version > 0]
    if not trained:
        return "", "the newest policy, as a Hugging Face folder"
    base = [each.score for each in alike if each.policy_version == 0 and each.score is not None]
    if base and max(trained) <= base[-1]:
        return "", "the newest policy, as a Hugging Face folder; none that was evaluated is better than the base policy"
    return " --best", "the trained policy with the best evaluation, as a Hugging Face folder"

"""`swarm trace`: where one group went, when, and how it was used."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from shared.config import NodeConfig
from shared.roles import OPERATOR
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.text import visible, visible_json
from shared.transport.base import Transport, TransportError
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, load_chosen
from swarm_cli.console import note, say
from swarm_cli.errors import CommandError
from swarm_cli.observe.snapshot import ended_run, nodes_here
from swarm_cli.rollouts.command import CONNECT_TIMEOUT_S, RunOption
from swarm_cli.rollouts.records import clock, names_in_run
from swarm_cli.target import Target, check_listening, looking_at

if TYPE_CHECKING:
    from swarm_cli.trace_search import Path, Search


SHORTEST_ID = 6
_ID = re.compile(rf"[0-9a-f]{{{SHORTEST_ID},64}}")


def trace(
    rollout_id: Annotated[
        str, typer.Argument(metavar="GROUP", help="The group's id or its beginning, from a log or from `swarm rollouts`.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    run: RunOption = "",
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Follow one group: when it was generated, scored and shared, which nodes took it in or refused
    it, in which batch it is, and how the trainer used it. Searches all nodes on the server, the
    swarm's stream, and the records in the run's folder, and says what is no longer known."""
    prefix = rollout_id.strip().lower()
    if not _ID.fullmatch(prefix):
        raise CommandError(f"{rollout_id[:80]!r} is not a group's id: give {SHORTEST_ID} to 64 of its digits (0-9, a-f)")
    node_config = load_chosen(config)
    with looking_at(node_config, run, node_url, swarm_url, only_here=False) as target:
        if target.ended is not None:
            note(target.ended.sentence(target.run, time.time()))
        check_listening(node_config.node.var_dir, target)
        path = asyncio.run(_find(node_config, prefix, run, target))
    if not path.stations:
        raise CommandError(
            f"no trace of a group {prefix}: not in the streams of the nodes on this server (--node-url), not in the swarm's "
            "(--swarm-url), not in the records of the newest run here (--run); all three only keep the recent past"
        )
    if len(path.makers) > 1 or _several(path, prefix):
        raise CommandError(f"several groups' ids begin with {prefix}: give more digits: {', '.join(sorted(path.ids)[:8])}")
    if as_json:
        say(visible_json(path.as_object()))
        return
    _show(path)


def _several(path: Path, prefix: str) -> bool:
    """Check whether several ids match. Records name a group without its maker, so `makers` can miss
    it.
    """
    return len([group_id for group_id in path.ids if group_id.startswith(prefix)]) > 1


async def _find(config: NodeConfig, prefix: str, run: str, target: Target) -> Path:
    """The group's path: of a run that has ended from its records, else also from the streams."""
    from swarm_cli.trace_search import Search, say_what_is_missing

    search = Search(config, prefix, run or target.run, names_in_run(config, run))
    if target.ended is not None:
        nodes = [node.node for node in ended_run(config.node.var_dir / "runs" / run, target.ended).nodes]
        for node in nodes:
            await search.recorded(config.node.var_dir / "runs" / run / node, node)
        say_what_is_missing(search.path, nodes, search.windows)
        return search.path
    plane = await connect_node_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=target.node_url)
    try:
        nodes = sorted(await nodes_here(plane))
        await _with_swarm(search, config, plane, nodes, target.swarm_url)
    finally:
        await plane.close()
    say_what_is_missing(search.path, nodes, search.windows)
    return search.path


async def _with_swarm(search: Search, config: NodeConfig, plane: Transport, nodes: list[str], url: str | None) -> None:
    """Search the swarm's stream too, if its server answers."""
    swarm = None
    if url is not None:
        try:
            swarm = await connect_swarm_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=url)
        except TransportError as error:
            note(f"the swarm's stream was not searched: {error}")
    try:
        await search.everywhere(plane, nodes, swarm)
    finally:
        if swarm is not None:
            await swarm.close()


def _show(path: Path) -> None:
    makers = ", ".join(f"{maker.node}, draw {maker.draw}" for maker in path.makers) or "not known"
    say(visible(f"group {', '.join(sorted(path.ids))}, of {makers}"))
    stations = sorted(path.stations)
    say(visible(f"first seen {time.strftime('%Y-%m-%d', time.localtime(stations[0].time))}; each time is by its writer's clock"))
    widest = max(len(each.node) for each in stations)
    for each in stations:
        say(visible(f"  {clock(each.time)}  {each.node:{widest}}  {each.what:10}  {each.detail}"))
    if path.unknown:
        say("not known:")
    for sentence in path.unknown:
        say(visible(f"  {sentence}"))

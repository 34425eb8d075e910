"""One look at a swarm through its two planes: the directory, the nodes' buckets, and the streams.

Strangers write into the directory and the swarm's streams, so a look reads a bounded part of both,
and makes no request for each name that only they have written.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.control import NodeRecord
from shared.contracts.wire import DEFAULT_SWARM_ID
from shared.identity.permissions import OPERATOR
from shared.identity.statements import OTHER_SWARM, Heard, Standing
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.suggestion import did_you_mean
from shared.transport.base import AccessDenied, ConsumerState, NotConnected, StreamState, Transport, TransportError
from swarm_cli.errors import CommandError, checked_node
from swarm_cli.observe.directory import Directory, read_directory, usual_swarm
from swarm_cli.observe.evaluation_log import EvaluationLog, configured_swarm
from swarm_cli.observe.view import NodeView, gather, node_view
from swarm_cli.running import running_since

NODES_SHOWN = 100
"""The most nodes shown by default: first those on this server, then the directory's
newest entries.
"""
NAMES_TOLD = 8
NOBODY = "no node has written to this server"
NO_STATUS = "no service has written a status to this server"
START = "if a swarm is starting there, wait for its services; otherwise start one (`swarm up`), or name its server"
"""What to do about either."""


class NoSuchNode(CommandError):
    """There is no node of a name that the user gave."""

    def __init__(self, unknown: Sequence[str], there: Sequence[str], swarm_away: bool) -> None:
        """there: the nodes that there are. swarm_away: the directory could not be read."""
        self.there = there
        known = f"{', '.join(there[:NAMES_TOLD])}{f' and {len(there) - NAMES_TOLD} more' if len(there) > NAMES_TOLD else ''}"
        guess = did_you_mean(unknown[0], there)
        remedy = f"the nodes there are {known}{f'; {guess}' if guess else ''}" if there else f"{NOBODY}: {START}"
        away = " (the swarm's directory, which lists nodes on other servers, could not be read)" if swarm_away else ""
        super().__init__(f"no node {', '.join(unknown)} on this server or in its swarm's directory{away}: {remedy}")


@dataclass(frozen=True, slots=True)
class StreamFill:
    """How full a stream is and, if it has a durable consumer, how far that is behind."""

    stream: str
    state: StreamState
    consumer: ConsumerState | None = None


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node: its own report, its streams, and whether the swarm's directory lists it."""

    view: NodeView
    streams: tuple[StreamFill, ...]
    in_directory: bool
    entry: Heard[NodeRecord] | None = None
    """Its entry in the directory, with the signature checked."""
    elsewhere: bool = False
    """Its bucket is on another server, so of its steps and groups nothing is known here."""
    claimed: bool = False
    """This machine has the folder of a node of this name."""

    def held_on(self, now: float) -> list[str]:
        """The other machines that hold the node's name, if it is wanted twice."""
        return self.view.held_on(socket.gethostname(), now, claimed=self.claimed)

    @property
    def step(self) -> int | None:
        """Steps taken; None if it is not known."""
        return None if self.elsewhere else self.view.step

    @property
    def version(self) -> int | None:
        """Version of the newest published policy, of a node elsewhere by its signed entry; None if
        it is not known.
        """
        if not self.elsewhere:
            return self.view.version
        return self.entry.said.policy_version if self.entry is not None and self.entry.standing is Standing.SIGNED else None

    @property
    def node(self) -> str:
        """The node's name."""
        return self.view.node

    @property
    def statuses(self) -> bool:
        """Whether any service has ever written a status."""
        return bool(self.view.statuses)


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """The nodes at one time. `swarm_reachable` is None where there is no swarm plane;
    `swarm_problem`: why it cannot be reached.

    `left_out`: number of nodes and directory entries that are not among `nodes`; `unreadable`:
    number of invalid entries.
    """

    at: float
    nodes: tuple[NodeSnapshot, ...]
    swarm_streams: tuple[StreamFill, ...]
    swarm_reachable: bool | None
    left_out: int = 0
    unreadable: int = 0
    swarm: str | None = None
    """The swarm (`nats.swarm_id`) that the nodes are in, by their signed entries."""
    known: tuple[str, ...] = ()
    """Names that keep their places on what is shown (`EvaluationLog.established`)."""
    swarm_problem: str = ""
    swarm_denied: bool = False
    """The swarm's server lets this command not in, as in a node's pod for people, which has the key
    of the node's operator alone. It says nothing of the services.
    """

    earlier: tuple[str, ...] = ()
    """The nodes on this server that are not among `nodes` because they belong to another run than
    the one looked at, and none of their processes is alive.
    """

    @property
    def here(self) -> list[NodeView]:
        """The views of the nodes on this server."""
        return [node.view for node in self.nodes if not node.elsewhere]


async def take_snapshot(
    config: NodeConfig,
    node_url: str,
    swarm_url: str | None,
    names: Sequence[str],
    *,
    timeout_s: float,
    evaluations: EvaluationLog | None = None,
    most: int = NODES_SHOWN,
    run: str = "",
    swarm_id: str = "",
) -> SwarmSnapshot:
    """Look at `names`; if empty, at up to `most` of the nodes on this server and in the directory,
    without those that another run than `run` left on the server. Also updates `evaluations`. run,
    swarm_id: the run that is looked at and its swarm, "" if they are not known.

    Raises:
        CommandError: one of `names` is none.
        NoSuchNode: there is no node of one of these names.
        NotConnected, AccessDenied: of the node plane. A swarm plane that cannot be reached, or that
            lets this user in no more, is part of the snapshot.
    """
    for name in names:
        checked_node(name)
    node_plane = await connect_node_plane(config, OPERATOR, timeout_s=timeout_s, url=node_url)
    try:
        swarm_plane, problem, denied = await _try_connect(config, swarm_url, timeout_s)
        try:
            here = await nodes_here(node_plane)
            if swarm_plane and evaluations:
                await evaluations.follow(swarm_plane, configured_swarm(config))
            known = evaluations.established() if evaluations else []
            listed = await read_directory(swarm_plane, names or [*sorted(here), *known][:most]) if swarm_plane else Directory()
            if unknown := [name for name in names if name not in here and name not in listed.payloads]:
                there = list(dict.fromkeys([*sorted(here), *listed.names]))
                raise NoSuchNode(unknown, there, swarm_url is not None and swarm_plane is None)
            wanted, left_out = (list(names), 0) if names else chosen(config.node.id, here, listed, most, known)
            # The directory also lists nodes whose node plane is on another server, or in an account
            # that this user cannot see.
            views = await gather(node_plane, [name for name in wanted if name in here])
            begun = running_since(config.node.var_dir / "runs" / run) if run else None
            views = [replace(view, begun=begun or 0.0) if view.run in ("", run) else view for view in views]
            at = time.time()  # before the slow reads below, so that no process looks silent because of them
            earlier = [] if names else [view.node for view in views if view.left_by_another_run(run, at)]
            views = [view for view in views if view.node not in earlier]
            listing = {name: listed.entry(name) for name in wanted}
            own = names_here(config.node.var_dir)
            nodes = [
                NodeSnapshot(
                    view,
                    await _node_streams(node_plane, view.node),
                    listing[view.node] is not None,
                    listing[view.node],
                    claimed=view.node in own,
                )
                for view in views
            ]
            nodes += [
                NodeSnapshot(node_view(name, ()), (), listing[name] is not None, listing[name], elsewhere=True)
                for name in wanted
                if name not in here
            ]
            configured = config.nats.swarm_id if config.nats.swarm_id != DEFAULT_SWARM_ID else swarm_id or DEFAULT_SWARM_ID
            swarm = swarm_of(nodes, here, configured, at, evaluations)
            if swarm_plane and evaluations:
                await evaluations.follow(swarm_plane, swarm)
            nodes = [replace(node, entry=judged(node.entry, swarm, evaluations)) for node in nodes]
            swarm_streams = await _fills(swarm_plane, [subjects.SWARM_ROLLOUTS, subjects.SWARM_EVALS]) if swarm_plane else []
        finally:
            if swarm_plane:
                await swarm_plane.close()
    finally:
        await node_plane.close()
    reachable = None if swarm_url is None else swarm_plane is not None
    shown, streams = tuple(nodes), tuple(swarm_streams)
    return SwarmSnapshot(
        at, shown, streams, reachable, left_out, listed.unreadable, swarm, tuple(known), problem, denied, tuple(earlier)
    )


def names_here(var_dir: Path) -> set[str]:
    """The names of the nodes that have a folder in a run of this machine."""
    return {folder.name for folder in (var_dir / "runs").glob("*/*") if folder.is_dir()}


def with_reports(snapshot: SwarmSnapshot, reports: EvaluationLog) -> SwarmSnapshot:
    """The snapshot with the newest signed held-out score of each node on another server, whose
    bucket cannot be read here.
    """
    newest = {heard.said.node: heard.said for heard in reports.heard(snapshot.swarm) if heard.standing is Standing.SIGNED}
    return replace(
        snapshot,
        nodes=tuple(
            replace(node, view=replace(node.view, evaluation=newest.get(node.node))) if node.elsewhere else node
            for node in snapshot.nodes
        ),
    )


def judged(entry: Heard[NodeRecord] | None, swarm: str | None, evaluations: EvaluationLog | None) -> Heard[NodeRecord] | None:
    """A node's entry as judged in the swarm being looked at: refused if it is for another swarm or
    from another key than the name's.
    """
    if entry is None or entry.standing is not Standing.SIGNED:
        return entry
    if swarm is not None and entry.swarm != swarm:
        return Heard(entry.said, Standing.REFUSED, entry.public_key, entry.swarm, OTHER_SWARM)
    return evaluations.checked(entry) if evaluations else entry


def swarm_of(
    nodes: Sequence[NodeSnapshot], here: Collection[str], configured: str, now: float, evaluations: EvaluationLog | None = None
) -> str | None:
    """The swarm that these nodes are in: the configured one; else the one that most nodes on this
    server name; else that of the node that has signed for longest; else the one that most nodes
    name. `swarm up` names a swarm after its run, which other terminals do not know.
    """
    if configured != DEFAULT_SWARM_ID:
        return configured
    entries = [(node.node in here, node.entry) for node in nodes if node.entry is not None]
    local = usual_swarm((entry for known, entry in entries if known), now)
    senior = evaluations.senior_swarm(entry for _, entry in entries) if evaluations and not local else None
    return local or senior or usual_swarm((entry for _, entry in entries), now)


def chosen(own: str, here: Collection[str], listed: Directory, most: int, known: Sequence[str] = ()) -> tuple[list[str], int]:
    """Names to look at, at most `most`, and how many others there are. `here`: nodes whose bucket
    is on this server; `known`: established names.

    This node and the others on this server come first, whatever the directory says, then known
    names, then the directory's newest. None if no node has written anywhere.
    """
    there = [name for name in known if name in listed.payloads]
    ranked = list(dict.fromkeys([*([own] if own in here else []), *sorted(here), *there, *listed.names]))
    return sorted(ranked[:most]), len(ranked[most:]) + listed.left_out


async def _try_connect(config: NodeConfig, url: str | None, timeout_s: float) -> tuple[Transport | None, str, bool]:
    """The swarm plane, or why there is none and whether that is because of the key."""
    if url is None:
        return None, "", False
    try:
        return await connect_swarm_plane(config, OPERATOR, timeout_s=timeout_s, url=url), "", False
    except (NotConnected, AccessDenied) as error:
        return None, str(error), isinstance(error, AccessDenied)


async def nodes_here(node_plane: Transport) -> frozenset[str]:
    """Names of the nodes whose buckets are on this server."""
    return frozenset(node for bucket in await node_plane.kv.buckets() if (node := subjects.node_of_bucket(bucket)))


async def _node_streams(plane: Transport, node: str) -> tuple[StreamFill, ...]:
    rollouts = subjects.node_rollouts_stream(node)
    fills = await _fills(
        plane,
        [rollouts, subjects.node_scored_stream(node), subjects.node_batches_stream(node), subjects.node_dead_letters_stream(node)],
    )
    try:
        lag = await plane.consumer_state(rollouts, subjects.VERIFIER_CONSUMER)
    except TransportError:
        return tuple(fills)
    return tuple(StreamFill(fill.stream, fill.state, lag) if fill.stream == rollouts else fill for fill in fills)


async def _fills(plane: Transport, streams: Sequence[str]) -> list[StreamFill]:
    fills = []
    for stream in streams:
        try:
            fills.append(StreamFill(stream, await _state(plane, stream)))
        except TransportError:
            continue
    return fills


async def _state(plane: Transport, stream: str) -> StreamState:
    """Its size in bytes is known only to who may ask the server."""
    try:
        return await plane.stream_state(stream)
    except AccessDenied:
        ends = await plane.ends(stream)
        return StreamState(ends.first_seq, ends.last_seq, ends.messages, None)

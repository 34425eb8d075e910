"""Reads the swarm's directory, `swarm_nodes`. Strangers write there, so only a bounded part is
read, and entries are checked.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.control import NodeRecord, ServiceStatus, TrainerPosition
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.contracts.wire import DEFAULT_SWARM_ID, MessageError, is_node_name
from shared.identity.permissions import OPERATOR
from shared.identity.statements import OTHER_SWARM, Heard, Standing, hear, said_at, said_in
from shared.rewards import CAUSES
from shared.roles import ROLES, Role
from shared.run_records import EVAL_FILE, METRICS_FILE
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.runtime.status import STOPPED
from shared.suggestion import did_you_mean
from shared.transport.base import AccessDenied, ConsumerState, KvEntry, NotConnected, StreamState, Transport, TransportError
from swarm_cli.errors import CommandError, checked_node
from swarm_cli.observe.evaluation_log import EvaluationLog, configured_swarm
from swarm_cli.observe.node_state import NodeView, gather, node_view
from swarm_cli.observe.run_files import RecordedScores, newest_step, read_unknown
from swarm_cli.runs import RunEnd, running_since

ENTRIES_READ = 4096
"""The most entries that are read, the newest first. An honest node renews its entry every 10 s;
after 15 minutes of silence an entry is removed.
"""


@dataclass(frozen=True, slots=True)
class Directory:
    """Names of nodes, newest entry first, and their entries. `unreadable`: number of invalid
    entries; `left_out`: number of entries that were not read.
    """

    names: tuple[str, ...] = ()
    unreadable: int = 0
    left_out: int = 0
    payloads: Mapping[str, bytes] = field(default_factory=dict)

    def entry(self, name: str) -> Heard[NodeRecord] | None:
        """A node's entry with its signature checked; None if it has none."""
        payload = self.payloads.get(name)
        return None if payload is None else hear(payload, NodeRecord, time.time())

    def entries(self, swarm: str | None = None) -> list[Heard[NodeRecord]]:
        """All entries, each with its signature checked; entries for another swarm than `swarm` are
        refused.
        """
        now = time.time()
        return [hear(payload, NodeRecord, now, swarm) for payload in self.payloads.values()]


def usual_swarm(entries: Iterable[Heard[NodeRecord]], now: float) -> str | None:
    """The swarm that most nodes' signed entries name; None if no entry is signed.

    If several swarms have equally many nodes, the newest entry decides. An entry from the future
    counts as a node but never as the newest, because its sender could then choose the swarm.
    """
    names, newest = Counter[str](), dict[str, float]()
    for entry in entries:
        if entry.standing is Standing.SIGNED and entry.swarm is not None:
            names[entry.swarm] += 1
            at = said_at(entry.said)
            newest[entry.swarm] = max(newest.get(entry.swarm, 0.0), at if at <= now else 0.0)
    return max(names, key=lambda swarm: (names[swarm], newest[swarm], swarm), default=None)


def directory(entries: Iterable[KvEntry], left_out: int = 0) -> Directory:
    """The directory made of `entries`. A valid entry has the node's name both as its key and in its
    record, and its record decodes.
    """
    payloads, unreadable = {}, 0
    for entry in entries:
        try:
            listed = is_node_name(entry.key) and said_in(entry.value, NodeRecord).node == entry.key
        except MessageError:
            listed = False
        if listed:
            payloads[entry.key] = entry.value
        else:
            unreadable += 1
    return Directory(tuple(payloads), unreadable, left_out, payloads)


async def read_directory(swarm_plane: Transport, wanted: Sequence[str] = ()) -> Directory:
    """The newest entries, and those of the nodes in `wanted`. Empty if there is no directory yet or
    it cannot be read.
    """
    bucket = subjects.SWARM_NODES_BUCKET
    try:
        entries, left_out = await swarm_plane.kv.newest(bucket, ENTRIES_READ)
        known = {entry.key for entry in entries}
        missing = [name for name in wanted if name not in known] if left_out else []
        found = [await swarm_plane.kv.get(bucket, name) for name in missing]
    except TransportError:
        return Directory()
    asked = [entry for entry in found if entry is not None]
    return directory([*entries, *asked], left_out - len(asked))


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


_NODES_NAMED = 20


def ended_run(folder: Path, end: RunEnd, nodes: list[str] | None = None) -> SwarmSnapshot:
    """The nodes of the run in `folder` as they were at its end; only `nodes` if some are named.

    Raises:
        CommandError: the run has no node of such a name.
    """
    there = nodes_on_record(folder)
    if unknown := [name for name in nodes or [] if name not in there]:
        raise no_records(folder, unknown)
    views = [_view(folder / name, end) for name in there if not nodes or name in nodes]
    return SwarmSnapshot(time.time(), tuple(NodeSnapshot(view, (), False) for view in views), (), None)


def nodes_on_record(folder: Path) -> list[str]:
    """The nodes of which the run in `folder` has records, by name."""
    if not folder.is_dir():
        return []
    return sorted(each.name for each in folder.iterdir() if is_node_name(each.name) and _is_node(each))


def no_records(folder: Path, unknown: Sequence[str]) -> CommandError:
    """The error that the run in `folder` has no records of some nodes, with those that it has."""
    there = nodes_on_record(folder)
    has = ", ".join(there[:_NODES_NAMED]) or "no node"
    more = f" and {len(there) - _NODES_NAMED} more" if len(there) > _NODES_NAMED else ""
    guess = f"; {question}" if (question := did_you_mean(unknown[0], there)) else ""
    return CommandError(f"run {folder.name} has no records of {', '.join(unknown)}: it has those of {has}{more}{guess}")


def _is_node(folder: Path) -> bool:
    names = (METRICS_FILE, EVAL_FILE, *(f"{role}.log" for role in ROLES))
    return any((folder / name).is_file() for name in names)


def _view(folder: Path, end: RunEnd) -> NodeView:
    node = folder.name
    reports = [each.newest for each in RecordedScores().read({node: folder}).get(node, {}).values()]
    evaluation = max(reports, key=lambda report: report.created_at, default=None)
    step = newest_step(folder).get("step", 0)
    step = step if isinstance(step, int) and step >= 0 else 0
    figures: dict[Role, dict[str, float]] = {"verifier": _unknown_rewards(folder)}
    if evaluation is not None and evaluation.unknown:
        figures["generator"] = {StatusFigure.EVAL_UNKNOWN: float(evaluation.unknown)}
    statuses = [
        ServiceStatus(
            node=node, role=role, replica="0", pid=0, host=socket.gethostname(), state=STOPPED, started_at=0.0,
            updated_at=min(end.at, max(0.0, log.stat().st_mtime)) if (log := folder / f"{role}.log").is_file() else end.at,
            figures=figures.get(role, {}),
        )
        for role in ROLES
    ]  # fmt: skip
    position = TrainerPosition(policy_version=step, consumed_local=0, finished=end.how == "complete")
    version = max(step, evaluation.policy_version if evaluation is not None else 0)
    return NodeView(node, tuple(statuses), position, evaluation=evaluation, run=folder.parent.name, recorded_version=version)


def _unknown_rewards(folder: Path) -> dict[str, float]:
    """The verifier's counts of answers whose reward is unknown, as its status had them."""
    figures: dict[str, float] = {}
    for (_, cause), answers in read_unknown(folder).items():
        if cause in CAUSES:
            name = FigureFamily.UNKNOWN_REWARDS.of(cause)
            figures[name] = figures.get(name, 0.0) + answers
    return figures

"""One look at a swarm: through its two planes (the directory, the nodes' buckets, the streams),
from outside through its hub alone, or of a run that has ended from its records on this machine.

Strangers write into the directory and the swarm's streams, so a look reads a bounded part of both,
and makes no request for each name that only they have written.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shared.config.verifier_section import ViewConfig
from shared.contracts import subjects
from shared.contracts.codec import decode
from shared.contracts.control import EvalReport, LeaseRecord, NodeRecord, PolicyPointer, ServiceStatus, TrainerPosition
from shared.contracts.status_figures import STOPPED, FigureFamily, StatusFigure
from shared.contracts.streams import STREAMS_FILE, missing, noted_names
from shared.contracts.wire import DEFAULT_SWARM_ID, MessageError, is_node_name
from shared.identity.statements import OTHER_SWARM, CheckedStatement, SignatureStatus
from shared.lease.name import NameTaken, name_owner
from shared.rewards import CAUSES
from shared.roles import OPERATOR, ROLES, SEVERAL, Role
from shared.run_records import EVAL_FILE, METRICS_FILE
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.suggestions import did_you_mean
from shared.transport.base import AccessDenied, KvEntry, NotConnected, StreamState, Transport, TransportError, bucket_stream
from swarm_cli.errors import CommandError, checked_node
from swarm_cli.observe.evaluation_log import (
    Directory,
    EvaluationLog,
    configured_swarm,
    read_directory,
    usual_swarm,
    with_places,
)
from swarm_cli.observe.node_state import NodeState, StreamFill
from swarm_cli.observe.run_files import (
    Evaluation,
    newest_step,
    read_evaluations,
    read_unknown,
    recorded_evaluations,
    unsaved_words,
)
from swarm_cli.observe.verdict import node_verdict
from swarm_cli.runs import RunEnd, running_since
from swarm_cli.target import Target, explained, run_here

NODES_SHOWN = 100
"""The most nodes shown by default: first those on this server, then the directory's
newest entries.
"""
UNSIGNED_SHOWN = 10
"""The most unsigned names of a hub shown: anybody who reaches an open one can invent any number."""
LOOK_S = 15.0
"""If a look takes longer, the server is taken to be gone."""
HUB_S = 30.0
"""If a look at a hub takes longer, the server is taken to be gone."""
NAMES_TOLD = 8
NOBODY = "no node has written to this server"
NO_STATUS = "no service has written a status to this server"
START = "if a swarm is starting there, wait for its services; otherwise start one (`swarm up`), or name its server"
"""What to do about either."""
NOTHING_LOST: Mapping[str, tuple[str, ...]] = {}
KEYS_READ = 1024
"""If a node's bucket has more keys, each role's are read apart, the newest of as many writes."""
PROCESSES_READ = 256
"""The most processes of a role that are looked at, those that wrote last."""


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
class SwarmState:
    """The nodes at one time. `swarm_reachable` is None where there is no swarm plane;
    `swarm_problem`: why it cannot be reached, or its directory cannot be read.

    `left_out`: number of nodes and directory entries that are not among `nodes`; `unreadable`:
    number of invalid entries.
    """

    at: float
    nodes: tuple[NodeState, ...]
    swarm_streams: tuple[StreamFill, ...] = ()
    swarm_reachable: bool | None = None
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
    groups: int | None = None
    """Number of groups in the hub's window; None if it was not asked or may not be known."""
    other_swarms: int = 0
    """Number of directory entries that are signed for another swarm, of a hub."""

    @property
    def alone(self) -> bool:
        """True if there is one node, with nobody to share with."""
        return bool(self.nodes) and all(node.alone for node in self.nodes)

    @property
    def here(self) -> list[NodeState]:
        """The nodes on this server."""
        return [node for node in self.nodes if not node.elsewhere]


async def take_snapshot(
    config: ViewConfig,
    target: Target,
    names: Sequence[str],
    *,
    timeout_s: float,
    within_s: float = LOOK_S,
    evaluations: EvaluationLog | None = None,
    most: int = NODES_SHOWN,
    expected: bool = False,
) -> SwarmState:
    """Look at `names`; if empty, at up to `most` of the nodes on this server and in the directory,
    without those that another run left on the server. Also updates `evaluations`. A run that has
    ended is looked at in its records. timeout_s: of each connection. expected: the names are of
    nodes that start here; one that has written nothing yet is among them.

    Raises:
        CommandError: one of `names` is none.
        NoSuchNode: there is no node of one of these names.
        NotConnected, AccessDenied: of the node plane; also if the look takes longer than
            `within_s`. ServerSilent and RunGone if that explains why it does not answer. A swarm
            plane that cannot be reached, or that lets this user in no more, is part of the
            snapshot.
    """
    if target.ended is not None:
        return await asyncio.to_thread(ended_run, config.node.var_dir / "runs" / target.run, target.ended, names)
    try:
        async with asyncio.timeout(within_s):
            return await _look(config, target, names, timeout_s, evaluations, most, expected=expected)
    except TimeoutError:
        away = NotConnected(f"{target.node_url} took longer than {within_s:.0f} s to answer")
    except NotConnected as error:
        away = error
    raise await asyncio.to_thread(explained, config.node.var_dir, target, away)


async def _look(
    config: ViewConfig,
    target: Target,
    names: Sequence[str],
    timeout_s: float,
    evaluations: EvaluationLog | None,
    most: int,
    *,
    expected: bool,
) -> SwarmState:
    for name in names:
        checked_node(name)
    runs, run = config.node.var_dir / "runs", run_here(config.node.var_dir, target)
    run_dir = runs / run if run else None
    node_plane = await connect_node_plane(config, OPERATOR, timeout_s=timeout_s, url=target.node_url)
    try:
        swarm_plane, problem, denied = await _try_connect(config, target.swarm_url, timeout_s)
        try:
            lost = await lost_streams(node_plane, run_dir) if run_dir else {}
            here = await nodes_here(node_plane) | lost.keys() | set(names if expected else ())
            if swarm_plane and evaluations:
                await evaluations.follow(swarm_plane, configured_swarm(config))
            known = evaluations.established() if evaluations else []
            listed = await read_directory(swarm_plane, names or [*sorted(here), *known][:most]) if swarm_plane else Directory()
            if unknown := [name for name in names if name not in here and name not in listed.payloads]:
                there = list(dict.fromkeys([*sorted(here), *listed.names]))
                raise NoSuchNode(unknown, there, target.swarm_url is not None and swarm_plane is None)
            wanted, left_out = (list(names), 0) if names else chosen(config.node.id, here, listed, most, known)
            # The directory also lists nodes whose node plane is on another server, or in an account
            # that this user cannot see.
            nodes = await gather(node_plane, [name for name in wanted if name in here], lost)
            begun = running_since(run_dir) if run_dir else None
            nodes = [replace(node, begun=begun or 0.0) if node.run in ("", run) else node for node in nodes]
            at = time.time()  # before the slow reads below, so that no process looks silent because of them
            earlier = [] if names else [node.node for node in nodes if node.left_by_another_run(run)]
            own = {folder.name for folder in runs.glob("*/*") if folder.is_dir()}
            nodes = [
                replace(node, at=at, streams=await _node_streams(node_plane, node.node), claimed=node.node in own)
                for node in nodes
                if node.node not in earlier
            ]
            if len({*here, *listed.names}) == 1 and target.swarm_url in (None, target.node_url):
                nodes = [replace(node, alone=True) for node in nodes]
            nodes += [NodeState(name, at=at, elsewhere=True) for name in wanted if name not in here]
            nodes = [replace(node, entry=listed.entry(node.node)) for node in nodes]
            configured = configured_swarm(config) or target.swarm_id or DEFAULT_SWARM_ID
            swarm = swarm_of(nodes, here, configured, at, evaluations)
            if swarm_plane and evaluations:
                await evaluations.follow(swarm_plane, swarm)
            nodes = [replace(node, entry=judged(node.entry, swarm, evaluations)) for node in nodes]
            reports = evaluations.reports(swarm) if evaluations else []
            unsigned = evaluations.unsigned(swarm) if evaluations else frozenset[str]()
            if not names:
                unlisted = _unlisted([report.node for report in reports], unsigned, {*here, *listed.payloads}, known)
                room = max(0, most - len(nodes))
                nodes += [NodeState(name, at=at, elsewhere=True) for name in unlisted[:room]]
                left_out += len(unlisted[room:])
            swarm_streams = await _fills(swarm_plane, [subjects.SWARM_ROLLOUTS, subjects.SWARM_EVALS]) if swarm_plane else []
        finally:
            if swarm_plane:
                await swarm_plane.close()
    finally:
        await node_plane.close()
    by_node: dict[str, list[EvalReport]] = {}
    for report in reports:
        by_node.setdefault(report.node, []).append(report)
    return SwarmState(
        at,
        tuple(_with_scores(node, by_node.get(node.node, []), unsigned, runs, run) for node in nodes),
        tuple(swarm_streams),
        None if target.swarm_url is None else swarm_plane is not None,
        left_out,
        listed.unreadable,
        swarm,
        tuple(known),
        problem or listed.problem,
        denied,
        tuple(earlier),
    )


def _with_scores(node: NodeState, reports: Sequence[EvalReport], unsigned: Collection[str], runs: Path, run: str) -> NodeState:
    known = node.run or run
    in_files = read_evaluations(runs / known / node.node) if known and not node.elsewhere else []
    signed = node.node not in unsigned or node.evaluation is not None
    return replace(node, scores=held_out_history(node.evaluation, reports, in_files), signed=signed)


def _unlisted(reporting: Iterable[str], unsigned: Collection[str], listed: Collection[str], known: Collection[str]) -> list[str]:
    """Nodes that have reported scores and have no entry in the directory any more: known names
    first, then others that sign, and of those that do not at most `UNSIGNED_SHOWN`.
    """
    names = [name for name in dict.fromkeys(reporting) if name not in listed]
    signing = [name for name in names if name not in unsigned]
    return [*sorted(signing, key=lambda name: name not in known), *[name for name in names if name in unsigned][:UNSIGNED_SHOWN]]


def held_out_history(
    bucket: EvalReport | None, reports: Iterable[EvalReport], in_files: Sequence[Evaluation] = ()
) -> tuple[Evaluation, ...]:
    """A node's held-out results from all sources, in order of version. A report on a lower version
    than the previous one means that training started again.
    """
    by_version: dict[int, Evaluation] = {evaluation.policy_version: evaluation for evaluation in in_files}
    for report in sorted(reports, key=lambda report: report.created_at):
        for later in [version for version in by_version if version > report.policy_version and not in_files]:
            del by_version[later]
        by_version[report.policy_version] = _reported(report, by_version)
    if bucket is not None:
        by_version[bucket.policy_version] = _reported(bucket, by_version)
    return tuple(by_version[version] for version in sorted(by_version))


def _reported(report: EvalReport, known: Mapping[int, Evaluation]) -> Evaluation:
    """The evaluation of a report, with its answers where the file has the same one."""
    found, same = Evaluation.of(report), known.get(report.policy_version)
    return found if same is None or same.at != found.at else replace(found, answers=same.answers)


def judged(
    entry: CheckedStatement[NodeRecord] | None, swarm: str | None, evaluations: EvaluationLog | None
) -> CheckedStatement[NodeRecord] | None:
    """A node's entry as judged in the swarm being looked at: refused if it is for another swarm or
    from another key than the name's.
    """
    if entry is None or entry.standing is not SignatureStatus.SIGNED:
        return entry
    if swarm is not None and entry.swarm != swarm:
        return CheckedStatement(entry.said, SignatureStatus.REFUSED, entry.public_key, entry.swarm, OTHER_SWARM)
    return evaluations.checked(entry) if evaluations else entry


def swarm_of(
    nodes: Sequence[NodeState], here: Collection[str], configured: str, now: float, evaluations: EvaluationLog | None = None
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


async def _try_connect(config: ViewConfig, url: str | None, timeout_s: float) -> tuple[Transport | None, str, bool]:
    """The swarm plane, or why there is none and whether that is because of the key."""
    if url is None:
        return None, "", False
    try:
        return await connect_swarm_plane(config, OPERATOR, timeout_s=timeout_s, url=url), "", False
    except (NotConnected, AccessDenied) as error:
        return None, str(error), isinstance(error, AccessDenied)


# The nodes on this server.


async def gather(transport: Transport, nodes: Sequence[str], lost: Mapping[str, tuple[str, ...]] = NOTHING_LOST) -> list[NodeState]:
    """Read every node's bucket. One that cannot be read is `unread`; its node may be well. lost: as
    of `lost_streams`.

    Raises:
        NotConnected: the server answers for none of them.
    """
    found: list[NodeState] = []
    silent: list[NotConnected] = []
    for node in nodes:
        entries, surplus = list[KvEntry](), dict[str, int]()
        try:
            if bucket_stream(subjects.node_bucket(node)) not in lost.get(node, ()):
                entries, surplus = await read_bucket(transport, node)
            found.append(replace(node_state(node, entries, await run_of(transport, node) if entries else ""), surplus=surplus))
        except TransportError as error:
            silent += [error] if isinstance(error, NotConnected) else []
            if silent and (not transport.connected or len(silent) == len(nodes)):
                raise silent[0] from None
            found.append(NodeState(node, unread=str(error)))
    return [replace(node, at=time.time(), lost=lost.get(node.node, ())) for node in found]


async def read_bucket(transport: Transport, node: str) -> tuple[list[KvEntry], dict[str, int]]:
    """The part of a node's bucket that displays need, and how many more keys each role has in it
    than are read, by stem such as `status.generator`. One role's many keys hide no other role's.
    """
    kv, bucket = transport.kv, subjects.node_bucket(node)
    stems = [f"{subjects.STATUS_PREFIX}{role}" for role in ROLES] + [subjects.lease_key(role) for role in SEVERAL]
    read, others = await kv.newest(bucket, KEYS_READ)
    if others:
        single = (subjects.lease_key(role) for role in ROLES if role not in SEVERAL)
        fixed = (subjects.POLICY_KEY, subjects.TRAINER_KEY, subjects.EVAL_KEY, *single)
        read = [entry for key in fixed if (entry := await kv.get(bucket, key)) is not None]
        for stem in stems:
            read += (await kv.newest(bucket, KEYS_READ, f"{stem}."))[0]
    entries, surplus = [entry for entry in read if entry.key.rpartition(".")[0] not in stems], dict[str, int]()
    for stem in stems:
        of_stem = [entry for entry in read if entry.key.rpartition(".")[0] == stem]
        entries += of_stem[:PROCESSES_READ]
        if others or len(of_stem) > PROCESSES_READ:
            written = await transport.counts(bucket_stream(bucket), f"$KV.{bucket}.{stem}.*")
            if more := len(written) - len(of_stem[:PROCESSES_READ]):
                surplus[stem] = more
    return entries, surplus


def _noting_folders(run_dir: Path) -> list[Path]:
    return sorted(note.parent for note in run_dir.glob(f"*/{STREAMS_FILE}"))


async def lost_streams(node_plane: Transport, run_dir: Path) -> dict[str, tuple[str, ...]]:
    """The streams that the nodes of a run of this machine have used, by the note in each node's
    folder, and the server says it does not have; only of nodes that lack some.
    """
    lost = {}
    for folder in _noting_folders(run_dir):
        try:
            gone = tuple(await missing(node_plane, noted_names(folder)))
        except TransportError:
            continue  # it does not say
        if gone and is_node_name(folder.name):
            lost[folder.name] = gone
    return lost


def node_state(node: str, entries: Iterable[KvEntry], run: str = "") -> NodeState:
    """Decode a bucket's entries. Unrelated keys are skipped; a value that does not decode is listed
    in `unreadable`. run: that the node's streams belong to; empty if it is not known.
    """
    statuses: list[ServiceStatus] = []
    position: TrainerPosition | None = None
    policy: PolicyPointer | None = None
    evaluation: EvalReport | None = None
    unreadable: list[str] = []
    leases: list[tuple[LeaseRecord, float]] = []
    for entry in entries:
        try:
            if entry.key.startswith(subjects.STATUS_PREFIX):
                statuses.append(_own_status(node, entry))
            elif entry.key.startswith(subjects.LEASE_PREFIX):
                leases.append((decode(entry.value, LeaseRecord), entry.stored_at))
            elif entry.key == subjects.TRAINER_KEY:
                position = decode(entry.value, TrainerPosition)
            elif entry.key == subjects.POLICY_KEY:
                policy = decode(entry.value, PolicyPointer)
            elif entry.key == subjects.EVAL_KEY:
                evaluation = _own_report(node, entry)
        except MessageError:
            unreadable.append(entry.key)
    return NodeState(node, tuple(statuses), position, policy, evaluation, tuple(unreadable), run=run, leases=tuple(leases))


def _own_status(node: str, entry: KvEntry) -> ServiceStatus:
    """The status under a key. Each role may write only its own keys, so a status about another
    process is refused, as is one of a replica that no configuration may name.
    """
    status = decode(entry.value, ServiceStatus)
    if not subjects.is_replica(status.replica):
        raise MessageError("malformed", f"no process is named as the one under {entry.key}")
    if status.node != node or entry.key != subjects.status_key(status.role, status.replica):
        raise MessageError("malformed", f"the status under {entry.key} is about {status.node}'s {status.role} {status.replica}")
    return status


def _own_report(node: str, entry: KvEntry) -> EvalReport:
    report = decode(entry.value, EvalReport)
    if report.node != node:
        raise MessageError("malformed", f"the evaluation under {entry.key} is about {report.node}")
    return report


async def run_of(transport: Transport, node: str) -> str:
    """The run that the node's streams on this server belong to; empty if it is not known."""
    try:
        owner = await name_owner(transport, node)
    except (TransportError, NameTaken):
        return ""
    return "" if owner is None else owner.run


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


# A hub, from outside.


async def look_at_hub(transport: Transport, scores: EvaluationLog, swarm: str | None = None) -> SwarmState:
    """One look at `swarm`; if None, at the swarm of the node that has signed for longest, or else
    at the one that most nodes of the directory are in. Updates `scores`. For each name, only what
    its first key signed for that swarm counts.

    Raises:
        NotConnected: the server does not answer in time.
    """
    try:
        async with asyncio.timeout(HUB_S):
            # Read scores first: they say which names are established, and if the directory has more
            # entries than are read, those names' entries are requested.
            await scores.follow(transport, swarm)
            listed = await read_directory(transport, scores.established())
            if swarm is None:
                entries = listed.entries()
                swarm = scores.senior_swarm(entries) or usual_swarm(entries, time.time())
                await scores.follow(transport, swarm)
            try:
                counts: Mapping[str, int] | None = await transport.counts(subjects.SWARM_ROLLOUTS, subjects.ALL_ROLLOUTS)
            except NotConnected:
                raise
            except AccessDenied:
                counts = None
            except TransportError:
                counts = {}  # the stream does not exist yet
    except TimeoutError:
        raise NotConnected(f"the server took longer than {HUB_S:.0f} s to answer") from None
    swarm = swarm or scores.usual_swarm()
    entries = [scores.checked(entry) for entry in listed.entries(swarm)]
    found = hub_state(
        time.time(), entries, scores.reports(swarm), counts, unsigned=scores.unsigned(swarm), known=scores.established()
    )
    left_out = found.left_out + listed.left_out
    return replace(found, swarm=swarm, left_out=left_out, unreadable=listed.unreadable, swarm_problem=listed.problem)


def hub_state(
    at: float,
    entries: Sequence[CheckedStatement[NodeRecord]],
    reports: Sequence[EvalReport],
    counts: Mapping[str, int] | None,
    *,
    most: int = NODES_SHOWN,
    unsigned: Collection[str] = (),
    known: Collection[str] = (),
) -> SwarmState:
    """The nodes of a hub, which write all of it themselves. What a key signed is shown as its
    node's; unsigned data is marked, and data with a refused signature is left out. Nodes with
    signed data come first, ordered by their newest score; of the others at most `UNSIGNED_SHOWN`
    are shown.

    Args:
        at: Unix time of the look.
        entries: The directory's entries, checked.
        reports: Held-out scores whose signature is not refused, each node's in order.
        counts: Messages in the stream of groups, by subject; None if they are not known. Subjects
            that belong to no node are ignored.
        most: How many nodes are shown.
        unsigned: Nodes with only unsigned scores.
        known: Nodes that are shown before others if there are more than `most`.
    """
    believed = [entry for entry in entries if entry.standing is not SignatureStatus.REFUSED]
    signing = {entry.said.node for entry in believed if entry.standing is SignatureStatus.SIGNED}
    signing |= {report.node for report in reports if report.node not in unsigned}
    # If a node signs, its unsigned entry is ignored: anybody may have overwritten the signed one.
    by_node = {
        entry.said.node: entry for entry in believed if entry.standing is SignatureStatus.SIGNED or entry.said.node not in signing
    }
    shared = {node: count for subject, count in (counts or {}).items() if (node := subjects.rollouts_author(subject))}
    scores: dict[str, list[EvalReport]] = {}
    for report in reports:
        if report.node not in signing or report.node not in unsigned:
            scores.setdefault(report.node, []).append(report)
    nodes = [
        NodeState(
            name, at=at, elsewhere=True, entry=by_node.get(name), scores=held_out_history(None, scores.get(name, [])),
            signed=name in signing, shared_window=None if counts is None else shared.get(name, 0),
        )
        for name in {*by_node, *shared, *scores}
    ]  # fmt: skip
    nodes.sort(key=lambda node: (not node.signed, node.newest_score is None, -_rank(node.newest_score), node.node))
    signed = [node for node in nodes if node.signed]
    shown = with_places([*signed, *nodes[len(signed) :][:UNSIGNED_SHOWN]], most, lambda node: node.signed and node.node in known)
    return SwarmState(
        at,
        tuple(shown),
        left_out=len(nodes) - len(shown),
        known=tuple(known),
        groups=None if counts is None else sum(shared.values()),
        other_swarms=sum(entry.problem == OTHER_SWARM for entry in entries),
    )


def _rank(score: Evaluation | None) -> float:
    return (score.mean_reward if score.pass_rate is None else score.pass_rate) or 0.0 if score else 0.0


# A run that has ended.

_NODES_NAMED = 20


def ended_run(folder: Path, end: RunEnd, nodes: Sequence[str] = ()) -> SwarmState:
    """The nodes of the run in `folder` as they were at its end; only `nodes` if some are named.

    Raises:
        CommandError: the run has no node of such a name.
    """
    there = nodes_on_record(folder)
    if unknown := [name for name in nodes if name not in there]:
        raise no_records(folder, unknown)
    return SwarmState(time.time(), tuple(_ended_node(folder / name, end) for name in there if not nodes or name in nodes))


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


def _ended_node(folder: Path, end: RunEnd) -> NodeState:
    node = folder.name
    recorded = recorded_evaluations(folder)
    newest = recorded[-1] if recorded else None
    step = newest_step(folder).get("step", 0)
    step = step if isinstance(step, int) and step >= 0 else 0
    figures: dict[Role, dict[str, float]] = {"verifier": _unknown_rewards(folder)}
    if newest is not None and newest.unknown:
        figures["generator"] = {StatusFigure.EVAL_UNKNOWN: float(newest.unknown)}
    statuses = [
        ServiceStatus(
            node=node, role=role, replica="0", pid=0, host=socket.gethostname(), state=STOPPED, started_at=0.0,
            updated_at=min(end.at, max(0.0, log.stat().st_mtime)) if (log := folder / f"{role}.log").is_file() else end.at,
            figures=figures.get(role, {}),
        )
        for role in ROLES
    ]  # fmt: skip
    position = TrainerPosition(policy_version=step, consumed_local=0, finished=end.how == "complete")
    version = max(step, newest.policy_version if newest is not None else 0)
    return NodeState(
        node, tuple(statuses), position, run=folder.parent.name, recorded_version=version, at=time.time(),
        unsaved=unsaved_words(folder), verdict=node_verdict(folder, ended=True), scores=tuple(read_evaluations(folder)),
    )  # fmt: skip


def _unknown_rewards(folder: Path) -> dict[str, float]:
    """The verifier's counts of answers whose reward is unknown, as its status had them."""
    figures: dict[str, float] = {}
    for (_, cause), answers in read_unknown(folder).items():
        if cause in CAUSES:
            name = FigureFamily.UNKNOWN_REWARDS.of(cause)
            figures[name] = figures.get(name, 0.0) + answers
    return figures

"""One look at a whole swarm through its two planes: the directory, every node's bucket, and the streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from shared import subjects
from shared.config import NodeConfig
from shared.messages import EvalReport, MessageError, decode
from shared.permissions import OPERATOR
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.transport.base import ConsumerState, NotConnected, StreamState, Transport, TransportError
from swarm_cli.view import NodeView, gather, node_view


@dataclass(frozen=True, slots=True)
class StreamFill:
    """How full a stream is and, where one reads it by a durable consumer, how far that is behind."""

    stream: str
    state: StreamState
    consumer: ConsumerState | None = None


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node: what it says of itself, its streams, and whether the swarm's directory lists it."""

    view: NodeView
    streams: tuple[StreamFill, ...]
    in_directory: bool

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
    """All nodes at one time. `swarm_reachable` is None where there is no swarm plane."""

    at: float
    nodes: tuple[NodeSnapshot, ...]
    swarm_streams: tuple[StreamFill, ...]
    swarm_reachable: bool | None


class EvaluationLog:
    """The held-out scores that nodes reported to the swarm, read on from look to look."""

    def __init__(self) -> None:
        self.reports: list[EvalReport] = []
        self._next_seq = 1

    async def follow(self, swarm_plane: Transport) -> None:
        """Read what is new. A server whose stream is shorter than what was read is another one: begin again."""
        try:
            state = await swarm_plane.stream_state(subjects.SWARM_EVALS)
            if state.last_seq + 1 < self._next_seq:
                self.reports, self._next_seq = [], 1
            while messages := await swarm_plane.read(subjects.SWARM_EVALS, self._next_seq, _REPORTS_A_READ):
                self._next_seq = messages[-1].seq + 1
                for message in messages:
                    with suppress(MessageError):  # the swarm's stream takes anybody's bytes
                        report = decode(await swarm_plane.payload(message), EvalReport)
                        if message.subject == subjects.evals(report.node):
                            self.reports.append(report)
        except TransportError:
            return


_REPORTS_A_READ = 256


async def take_snapshot(
    config: NodeConfig,
    node_url: str,
    swarm_url: str | None,
    names: Sequence[str],
    *,
    timeout_s: float,
    evaluations: EvaluationLog | None = None,
) -> SwarmSnapshot:
    """Look at `names`, or else at all nodes in the directory and on this server; the configuration's own when there are none.
    `evaluations` is brought up to date besides.

    Raises:
        NotConnected, AccessDenied: of the node plane. A swarm plane that cannot be reached is part of the snapshot.
    """
    node_plane = await connect_node_plane(config, OPERATOR, timeout_s=timeout_s, url=node_url)
    try:
        swarm_plane = await _try_connect(config, swarm_url, timeout_s)
        try:
            listed = await _directory(swarm_plane) if swarm_plane else []
            here = await _nodes_here(node_plane)
            wanted = list(names) or sorted({*listed, *here} or {config.node.id})
            # The directory also lists nodes whose own plane is elsewhere, or in an account that this user does not see.
            views = [*await gather(node_plane, [name for name in wanted if name in here])]
            views += [node_view(name, ()) for name in wanted if name not in here]
            nodes = [NodeSnapshot(view, await _node_streams(node_plane, view.node), view.node in listed) for view in views]
            if swarm_plane and evaluations:
                await evaluations.follow(swarm_plane)
            swarm_streams = await _fills(swarm_plane, [subjects.SWARM_ROLLOUTS, subjects.SWARM_EVALS]) if swarm_plane else []
        finally:
            if swarm_plane:
                await swarm_plane.close()
    finally:
        await node_plane.close()
    reachable = None if swarm_url is None else swarm_plane is not None
    return SwarmSnapshot(time.time(), tuple(nodes), tuple(swarm_streams), reachable)


async def _try_connect(config: NodeConfig, url: str | None, timeout_s: float) -> Transport | None:
    if url is None:
        return None
    try:
        return await connect_swarm_plane(config, OPERATOR, timeout_s=timeout_s, url=url)
    except NotConnected:
        return None


async def _directory(swarm_plane: Transport) -> list[str]:
    try:
        return [entry.key for entry in await swarm_plane.kv_all(subjects.SWARM_NODES_BUCKET)]
    except TransportError:
        return []


async def _nodes_here(node_plane: Transport) -> list[str]:
    return [node for bucket in await node_plane.buckets() if (node := subjects.node_of_bucket(bucket))]


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
            fills.append(StreamFill(stream, await plane.stream_state(stream)))
        except TransportError:
            continue
    return fills

"""The hub as a newcomer finds it before its node starts. Looking only reads."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.control import NodeRecord
from shared.contracts.limits import SWARM_LIMITS
from shared.contracts.wire import MessageError
from shared.identity.statements import SignatureStatus, check_statement
from shared.runtime.planes import connect_swarm_plane
from shared.transport.base import AccessDenied, Deadline, NoStream, NotConnected, Transport, TransportError, bucket_stream
from swarm_cli.observe.evaluation_log import read_directory

LOOK_S = 10.0
LOOK_AGAIN_S = 0.2
REFUSED_S = 1.0
"""What a server does not answer in this time, it refuses."""
RENEWED_LATE_S = 2.0
"""Nodes renew their entries this much later than they are to, on a busy machine."""


@dataclass(frozen=True, slots=True)
class HubLook:
    """State of a hub. `refused`: why the server does not let this key in, or why it cannot be
    trusted, and then it was not reached; `unreachable`: why it does not answer. Both are sentences,
    or empty if all is well.
    """

    refused: str = ""
    unreachable: str = ""
    reached: bool = True
    """Whether a server answered at all and may know this node's keys now."""
    streams: bool = False
    """Whether the swarm's streams exist."""
    skew_s: float | None = None
    """How far this machine's clock is ahead of the server's; None if it is not known."""
    holder: NodeRecord | None = None
    """The node that has the requested name."""
    nodes: tuple[str, ...] = ()
    """The nodes whose directory entries are signed for this swarm."""
    operates: bool = False
    """Whether a key that came with the token may ask about the hub's streams, as only an operator
    may.
    """
    others: int = 0
    """The number of other directory entries: unsigned, unreadable, or signed for another swarm."""


async def look_at_hub(config: NodeConfig, *, given_key: bool = False) -> HubLook:
    """Connect as the configured node and inspect the hub. Whatever the server does or says, this
    does not raise.

    given_key: the key for the hub came with the token, so it may be anybody's.
    """
    try:
        hub = await connect_swarm_plane(config, "join", timeout_s=LOOK_S)
    except AccessDenied as error:
        return HubLook(refused=str(error), reached=error.key_refused)
    except NotConnected as error:
        return HubLook(unreachable=error.cause, reached=False)
    try:
        look = await _look(hub, config.node.id, config.nats.swarm_id)
        if given_key and look.streams:
            look = replace(look, operates=await _operates(hub))
        return look
    finally:
        await hub.close()


async def _look(hub: Transport, name: str, swarm: str) -> HubLook:
    try:
        await hub.ends(subjects.SWARM_EVALS)
    except NoStream:
        return HubLook()  # the streams have not been made
    except TransportError as error:
        cause = error.cause if isinstance(error, NotConnected) else error
        return HubLook(unreachable=f"it lets this machine in, but does not answer requests: {cause}")
    skew_s = await _skew_s(hub)
    listed, now = await read_directory(hub, [name]), time.time() - (skew_s or 0.0)
    nodes = tuple(each for each, payload in listed.payloads.items() if holder(payload, each, swarm, now))
    held_by, others = await _holder(hub, name, swarm, now), len(listed.names) - len(nodes) + listed.unreadable
    return HubLook(streams=True, skew_s=skew_s, holder=held_by, nodes=nodes, others=others)


async def _operates(hub: Transport) -> bool:
    """Return whether this key may do more than a node. A node's request is refused, which takes a
    line in the server's log.
    """
    from shared.transport.nats.jetstream_api import call
    from shared.transport.nats.transport import connection_of

    try:
        await call(connection_of(hub), f"STREAM.INFO.{subjects.SWARM_ROLLOUTS}", None, Deadline(REFUSED_S), "a look at the streams")
    except TransportError:
        return False
    return True


async def _skew_s(hub: Transport) -> float | None:
    """Measure how far this machine's clock is ahead of the server's: exactly, if this user may ask
    the server about a stream, else by the entry that a node renewed last.
    """
    before = time.time()
    with suppress(TransportError):
        try:
            at = (await hub.stream_state(subjects.SWARM_ROLLOUTS)).at
        except AccessDenied:
            return await _skew_by_directory_s(hub)
        return None if at is None else (before + time.time()) / 2 - at
    return None


async def _skew_by_directory_s(hub: Transport) -> float | None:
    """The server stamps each entry of the directory as it stores it, and nodes renew theirs all the
    time. If the newest looks older than that allows, either no node is there or this clock is
    ahead, so one that is stored now is waited for. None if none comes.
    """
    renewed_s = SWARM_LIMITS.node_renewed_s
    directory, oldest_seq, deadline = bucket_stream(subjects.SWARM_NODES_BUCKET), 0, Deadline(renewed_s + RENEWED_LATE_S)
    while True:
        newest, now = (await hub.ends(directory)).last, time.time()
        if newest is not None:
            oldest_seq = oldest_seq or newest.seq
            age_s = now - newest.stored_at
            if age_s < 0 or newest.seq > oldest_seq:
                return age_s
            if age_s <= renewed_s:
                return 0.0
        if newest is None or deadline.passed:
            return None
        await asyncio.sleep(LOOK_AGAIN_S)


async def _holder(hub: Transport, name: str, swarm: str, now: float) -> NodeRecord | None:
    try:
        entry = await hub.kv.get(subjects.SWARM_NODES_BUCKET, name)
    except TransportError:
        return None
    return None if entry is None else holder(entry.value, name, swarm, now)


def holder(payload: bytes, name: str, swarm: str, now: float) -> NodeRecord | None:
    """The node that has the name according to this directory entry. On an open hub anybody may
    write there, so an entry counts only if a node signed it for this swarm and renewed it within
    the directory's time to live.
    """
    try:
        heard = check_statement(payload, NodeRecord, now, swarm)
    except MessageError:
        return None
    said = heard.said
    held = heard.standing is SignatureStatus.SIGNED and said.node == name and said.updated_at > now - SWARM_LIMITS.node_ttl_s
    return said if held else None

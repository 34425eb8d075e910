"""The hub as a newcomer finds it: whether it answers and lets the node in, who is there, its clock,
and its free space.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.control import NodeRecord
from shared.contracts.limits import SWARM_LIMITS
from shared.contracts.streams import swarm_streams
from shared.contracts.wire import MessageError
from shared.identity.statements import Standing, hear
from shared.runtime.planes import connect_swarm_plane
from shared.transport.base import AccessDenied, NoStream, NotConnected, StreamMissing, Transport, TransportError
from shared.transport.blobs import companion
from shared.transport.deadline import Deadline
from shared.transport.keys import bucket_stream
from shared.transport.nats.answers import count_of, readable
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import ApiError, call
from shared.transport.nats.listing import account
from shared.transport.nats.transport import connection_of
from swarm_cli.observe.snapshot import read_directory

LOOK_S = 10.0
LOOK_AGAIN_S = 0.2
REFUSED_S = 1.0
"""What a server does not answer in this time, it refuses."""
RENEWED_LATE_S = 2.0
"""Nodes renew their entries this much later than they are to, on a busy machine."""


@dataclass(frozen=True, slots=True)
class HubLook:
    """What was found. `refused`: why the server does not let this key in, or why it cannot be
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
    room: Room | None = None
    """The room for the streams that the node would make; None if it makes none."""
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
    from swarm_cli.join.hub import room_for_streams

    try:
        look = await _look(hub, config.node.id, config.nats.swarm_id)
        if given_key and look.streams:
            look = replace(look, operates=await _operates(hub))
        # Whoever holds a key for a hub may not make streams there.
        open_hub = not config.nats.swarm_key_file and not look.unreachable
        return replace(look, room=await room_for_streams(hub, config.nats.swarm_replicas)) if open_hub else look
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
    """Whether this key may do more than a node. A node's request is refused, which takes a line in
    the server's log.
    """
    from shared.transport.nats.jetstream_api import call
    from shared.transport.nats.transport import connection_of

    try:
        await call(connection_of(hub), f"STREAM.INFO.{subjects.SWARM_ROLLOUTS}", None, Deadline(REFUSED_S), "a look at the streams")
    except TransportError:
        return False
    return True


async def _skew_s(hub: Transport) -> float | None:
    """How far this machine's clock is ahead of the server's: exactly, if this user may ask the
    server about a stream, else by the entry that a node renewed last.
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
        heard = hear(payload, NodeRecord, now, swarm)
    except MessageError:
        return None
    said = heard.said
    held = heard.standing is Standing.SIGNED and said.node == name and said.updated_at > now - SWARM_LIMITS.node_ttl_s
    return said if held else None


ALL_STREAMS = tuple(each.name for spec in swarm_streams() for each in (spec, companion(spec)) if each is not None)
"""The swarm's streams that reserve space; the directory has no limit and reserves none."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the missing streams reserve, with all copies, and what the hub lets them.

    `there_bytes`: what it could still reserve; None if that is enough or not known.
    `account_bytes`: the account's limit if that is too small. `off`: why it keeps no streams.
    """

    missing: tuple[str, ...]
    needed_bytes: int
    there_bytes: int | None = None
    account_bytes: int | None = None
    off: str = ""


def in_gib(size_bytes: int, *, up: bool = False) -> str:
    """A size for people, rounded down, or `up`, so that nobody allots too little."""
    tenths = -(-size_bytes * 10 // 2**30) if up else size_bytes * 10 // 2**30
    return f"{tenths / 10:g} GiB"


def told_names(names: Sequence[str]) -> str:
    """Names of streams in a sentence."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else "".join(names)


PROBE = "SWARM_JOIN_CHECK"
"""An empty stream, removed at once. A server does not tell a client how much it may still reserve,
so it is asked to reserve as much as the missing streams will.
"""
_ASK_S = 5.0
_NO_ROOM = frozenset({10002, 10023, 10047})
"""JetStream's errors for an account's or a server's exhausted storage (its `errors.json`)."""
_PARTS = 32


async def room_for_streams(hub: Transport, replicas: int) -> Room | None:
    """The hub's room for the swarm's streams that it lacks; None if it has them all, or does not
    let this be asked.
    """
    specs = [each for spec in swarm_streams(replicas=replicas) for each in (spec, companion(spec)) if each is not None]
    connection = connection_of(hub)
    try:
        figures = await account(connection, Deadline(_ASK_S))
        missing = [spec for spec in specs if await _is_missing(hub, spec.name)]
    except ApiError as error:
        return Room(tuple(spec.name for spec in specs), 0, off=error.description)
    except TransportError:
        return None
    if not missing:
        return None
    names, needed = tuple(spec.name for spec in missing), sum(spec.max_bytes * spec.replicas for spec in missing)
    try:
        most, used = _storage_of(figures)
    except TransportError:
        return None
    if most is not None and most < used + needed:
        return Room(names, needed, max(0, most - used), most)
    return Room(names, needed, await _too_little(connection, needed, replicas))


def _storage_of(figures: dict[str, Any]) -> tuple[int | None, int]:
    """The account's limit (None: it has none) and what it uses or reserves, in bytes. Raises
    TransportError.
    """
    with readable("the account's figures"):
        most = (figures.get("limits") or {}).get("max_storage", -1)
        used = max(count_of(figures.get("storage", 0)), count_of(figures.get("reserved_storage", 0)))
        return None if most == -1 else count_of(most, 2**64), used


async def _is_missing(hub: Transport, stream: str) -> bool:
    try:
        await hub.stream_state(stream)
    except StreamMissing:
        return True
    return False


async def _too_little(connection: Connection, needed: int, replicas: int) -> int | None:
    """What the server can still reserve, to a 32nd of what is needed; None if that is enough, or if
    it does not say.
    """
    if await _reserves(connection, needed, replicas) is not False:
        return None
    possible, refused = 0, _PARTS
    while refused - possible > 1:
        tried = (possible + refused) // 2
        if await _reserves(connection, needed * tried // _PARTS, replicas):
            possible = tried
        else:
            refused = tried
    return needed * possible // _PARTS


async def _reserves(connection: Connection, size_bytes: int, replicas: int) -> bool | None:
    """Whether the server makes a stream of this size, all copies counted; None if something else
    prevents that.
    """
    config = {
        "name": PROBE,
        "subjects": [f"_{PROBE}"],
        "retention": "limits",
        "storage": "file",
        "max_bytes": size_bytes // replicas,
        "num_replicas": replicas,
        "description": "swarm join asks whether there is room; it may be removed",
    }
    await _remove(connection)  # of a check that was killed
    try:
        await call(connection, f"STREAM.CREATE.{PROBE}", config, Deadline(_ASK_S), f"stream {PROBE}")
    except ApiError as error:
        return False if error.err_code in _NO_ROOM else None
    except TransportError:
        return None
    finally:
        await _remove(connection)
    return True


async def _remove(connection: Connection) -> None:
    with suppress(TransportError):
        await call(connection, f"STREAM.DELETE.{PROBE}", None, Deadline(_ASK_S), f"removal of stream {PROBE}")

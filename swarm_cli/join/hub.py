"""One look at a swarm's hub, before a newcomer's node is started: reads only."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.control import NodeRecord
from shared.contracts.limits import SWARM_LIMITS
from shared.contracts.wire import MessageError
from shared.identity.statements import Standing, hear
from shared.runtime.planes import connect_swarm_plane
from shared.transport.base import AccessDenied, NotConnected, Transport, TransportError
from swarm_cli.observe.directory import read_directory

LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class HubLook:
    """What was found. `refused`: the server does not let this key in; `unreachable`: it does not
    answer. Both are sentences, empty where all is well.
    """

    refused: str = ""
    unreachable: str = ""
    streams: bool = False
    """Whether the swarm's streams are there."""
    skew_s: float | None = None
    """How far this machine's clock is ahead of the server's; None: the server did not tell."""
    holder: NodeRecord | None = None
    """Who has the name that was asked for."""
    nodes: tuple[str, ...] = ()
    """Who is there, as their keys signed it for this swarm."""
    others: int = 0
    """Entries of the directory that say nothing of who is there: unsigned, or of another swarm."""


async def look_at_hub(config: NodeConfig) -> HubLook:
    """Connect as the configured node, and look. Never raises for what a server does or says."""
    try:
        hub = await connect_swarm_plane(config, "join", timeout_s=LOOK_S)
    except AccessDenied as error:
        return HubLook(refused=str(error))
    except NotConnected as error:
        return HubLook(unreachable=str(error))
    try:
        return await _look(hub, config.node.id, config.nats.swarm_id)
    finally:
        await hub.close()


async def _look(hub: Transport, name: str, swarm: str) -> HubLook:
    before = time.time()
    try:
        state = await hub.stream_state(subjects.SWARM_ROLLOUTS)
    except NotConnected as error:
        return HubLook(unreachable=f"it lets this machine in, but does not answer what a node asks: {error}")
    except TransportError:
        return HubLook()  # nobody has made the streams
    skew_s = None if state.at is None else (before + time.time()) / 2 - state.at
    listed, now = await read_directory(hub, [name]), state.at or time.time()
    nodes = tuple(each for each, payload in listed.payloads.items() if holder(payload, each, swarm, now))
    held_by, others = await _holder(hub, name, swarm, now), len(listed.names) - len(nodes) + listed.unreadable
    return HubLook(streams=True, skew_s=skew_s, holder=held_by, nodes=nodes, others=others)


async def _holder(hub: Transport, name: str, swarm: str, now: float) -> NodeRecord | None:
    try:
        entry = await hub.kv.get(subjects.SWARM_NODES_BUCKET, name)
    except TransportError:
        return None
    return None if entry is None else holder(entry.value, name, swarm, now)


def holder(payload: bytes, name: str, swarm: str, now: float) -> NodeRecord | None:
    """Who has the name by this entry of the directory. On an open hub anybody may write there: only
    what a node signed for this swarm, and renewed in the time after which silence removes it, takes
    a name.
    """
    try:
        heard = hear(payload, NodeRecord, now, swarm)
    except MessageError:
        return None
    said = heard.said
    held = heard.standing is Standing.SIGNED and said.node == name and said.updated_at > now - SWARM_LIMITS.node_ttl_s
    return said if held else None

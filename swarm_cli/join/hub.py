"""One look at a swarm's hub, before a newcomer's node is started: reads only."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.control import NodeRecord
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
    """Who is there."""


async def look_at_hub(config: NodeConfig) -> HubLook:
    """Connect as the configured node, and look. Never raises for what a server does or says."""
    try:
        hub = await connect_swarm_plane(config, "join", timeout_s=LOOK_S)
    except AccessDenied as error:
        return HubLook(refused=str(error))
    except NotConnected as error:
        return HubLook(unreachable=str(error))
    try:
        return await _look(hub, config.node.id)
    finally:
        await hub.close()


async def _look(hub: Transport, name: str) -> HubLook:
    before = time.time()
    try:
        state = await hub.stream_state(subjects.SWARM_ROLLOUTS)
    except NotConnected as error:
        return HubLook(unreachable=f"it lets this machine in, but does not answer what a node asks: {error}")
    except TransportError:
        return HubLook()  # nobody has made the streams
    skew_s = None if state.at is None else (before + time.time()) / 2 - state.at
    listed = await read_directory(hub, [name])
    return HubLook(streams=True, skew_s=skew_s, holder=await _holder(hub, name), nodes=listed.names)


async def _holder(hub: Transport, name: str) -> NodeRecord | None:
    try:
        entry = await hub.kv.get(subjects.SWARM_NODES_BUCKET, name)
        heard = hear(entry.value, NodeRecord, time.time()) if entry is not None else None
    except (TransportError, MessageError):
        return None
    return heard.said if heard is not None and heard.standing is not Standing.REFUSED else None

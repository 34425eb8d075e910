"""An operator's connection to the streams of a plane, and its options."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from shared.config import NodeConfig
from shared.identity.permissions import OPERATOR
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.transport.nats.connection import Connection
from shared.transport.nats.transport import connection_of
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.nats.account_list import Plane
from swarm_cli.runs import is_named, servers, unnamed_server

CONNECT_TIMEOUT_S = 10.0
T = TypeVar("T")

PlaneOption = Annotated[
    Plane, typer.Option(help="Whose server and key to use: the node's or the swarm's. Without keys both may be on one server.")
]
KeyOption = Annotated[
    Path | None, typer.Option(help="Operator's key file.  [default: nats.node_key_file or swarm_key_file, as operator]")
]


def with_connection(
    config: NodeConfig, plane: Plane, key: Path | None, node_url: str, swarm_url: str, work: Callable[[Connection], Awaitable[T]]
) -> T:
    """Run `work` with an operator's connection to the plane's servers.

    Raises:
        CommandError: there is no such plane, or two were named.
        TransportError: no server answers, the key is refused, or the transport is in-memory.
    """
    if plane is Plane.BOTH:
        raise CommandError("choose one plane, because each has its own key: --plane node, then --plane swarm")
    named = is_named(config, node_url, swarm_url)
    return asyncio.run(_with_connection(config, plane, key, servers(config, node_url, swarm_url), work, named=named))


async def _with_connection(
    config: NodeConfig,
    plane: Plane,
    key: Path | None,
    urls: tuple[str, str | None],
    work: Callable[[Connection], Awaitable[T]],
    *,
    named: bool,
) -> T:
    # A key from the command line replaces the configured one of the chosen plane only.
    node_url, swarm_url = urls
    field = "node_key_file" if plane is Plane.NODE else "swarm_key_file"
    if key is not None:
        config = config.model_copy(update={"nats": config.nats.model_copy(update={field: str(key)})})
    if plane is Plane.SWARM and swarm_url is None:
        raise CommandError("nats.swarm_url is none, so this node has no swarm plane: set nats.swarm_url, or use --plane node")
    if plane is Plane.NODE:
        transport = await connect_node_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=node_url)
    else:
        transport = await connect_swarm_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=swarm_url or "")
    try:
        if not named:
            note(f"{unnamed_server(config.node.var_dir, node_url)}: it is used here. --node-url names another")
        return await work(connection_of(transport))
    finally:
        await transport.close()

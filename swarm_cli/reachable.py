"""Checks that the servers that a configuration names answer, and that its ports are free."""

from __future__ import annotations

from contextlib import suppress

from shared.config import NodeConfig
from shared.roles import ROLES
from shared.transport.base import Transport, TransportError
from swarm_cli.local.ports import is_free

CONNECT_S = 5.0


async def unreachable(config: NodeConfig) -> list[str]:
    """A sentence for each server that does not answer or refuses the connection, and for each port
    that is taken.
    """
    from shared.runtime.planes import connect_node_plane, connect_swarm_plane

    problems = []
    for role in ROLES if config.nats.node_key_file else ROLES[:1]:
        try:
            await _closed(await connect_node_plane(config, role, timeout_s=CONNECT_S))
        except TransportError as error:
            problems.append(f"nats.node_url ({role}): {error}")
    if config.nats.swarm_url is not None:
        try:
            await _closed(await connect_swarm_plane(config, "verifier", timeout_s=CONNECT_S))
        except TransportError as error:
            problems.append(f"nats.swarm_url: {error}")
    if config.generator.engine == "openai":
        problems += await _openai_problems(config)
    return problems + [
        f"http.base_port: port {port}, needed for the {role}, is taken: stop the process that has it, or choose another port"
        for role in ROLES
        if (port := config.http_port(role)) and not is_free(port, config.http.host)
    ]


async def _closed(transport: Transport) -> None:
    with suppress(TransportError):
        await transport.close()


async def _openai_problems(config: NodeConfig) -> list[str]:
    """What prevents the server from listing its models to a client with the configured key."""
    from services.generator.engines.base import EngineError
    from services.generator.engines.openai_requests import OpenAiRequests
    from services.generator.server_key import server_key
    from shared.runtime.errors import FatalError

    try:
        server = OpenAiRequests(config.generator.openai_url, server_key(config.generator), CONNECT_S, max_connections=1)
        try:
            await server.ask("GET", "/models")
        finally:
            await server.close()
    except (EngineError, FatalError) as error:
        return [f"generator.openai_url: {error}"]
    return []

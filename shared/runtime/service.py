"""The life of a service process: configuration, logs, health port, NATS, work, orderly shutdown.

Exit codes: 0 finished or stopped by SIGTERM/SIGINT; 78 (`EXIT_CONFIG`) it cannot continue and a
restart would not help; 1 crashed. Every process sets up the streams when it starts (idempotently),
because nothing guarantees which starts first.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

import structlog
from prometheus_client import CollectorRegistry

from shared.cancelling import cancel_and_wait
from shared.config import ConfigError, NodeConfig, load_config
from shared.contracts.status_figures import StatusFigure
from shared.contracts.streams import MissingStreams, prepare_node_streams, prepare_swarm_streams
from shared.roles import Role
from shared.runtime.errors import EXIT_CONFIG, FatalError
from shared.runtime.health import HealthServer, Heartbeat
from shared.runtime.logs import Log, configure_logging
from shared.runtime.metrics import PlaneMetrics, service_registry
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.runtime.status import STOPPED, StatusBoard
from shared.transport.base import AccessDenied, NotConnected, Transport


@dataclass
class ServiceContext:
    """What a service is given to work with."""

    config: NodeConfig
    role: Role
    replica: str
    node: Transport
    """Node plane: connected, the node's streams exist."""
    swarm: Transport | None
    """Swarm plane; for the verifier only, and None while it cannot be reached or when the node is
    alone.
    """
    log: Log
    registry: CollectorRegistry
    status: StatusBoard
    stopping: asyncio.Event
    ready: bool = field(default=False)
    planes: PlaneMetrics = field(default_factory=PlaneMetrics)

    def mark_ready(self, ready: bool = True) -> None:
        """Say that set-up is complete (`/readyz`)."""
        self.ready = ready


class Service(Protocol):
    """The work of one role."""

    async def run(self, context: ServiceContext) -> None:
        """Do all the work; return soon after `context.stopping` is set, or when finished for good.

        Raises:
            FatalError: cannot go on, and a restart would not help.
        """
        ...


def main(role: Role, build: Callable[[NodeConfig], Service]) -> NoReturn:
    """Run one service as a process of its own: `python -m services.<role> [--config FILE]`."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=f"The {role} of one swarm node.")
    parser.add_argument("--config", type=Path, help="the node's TOML file (default: the file named by SWARM_CONFIG)")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config)
    except ConfigError as error:
        print(f"{role}: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    configure_logging(level=config.log.level, log_format=config.log.format, file=config.node.run_dir / f"{role}.log")
    log = structlog.get_logger(role).bind(node=config.node.id, role=role)
    try:
        asyncio.run(_live(role, config, build, log))
    except FatalError as error:
        log.error("cannot_go_on", reason=str(error))
        _leave(EXIT_CONFIG)
    except KeyboardInterrupt:
        _leave(0)
    except Exception:
        log.exception("crashed")
        _leave(1)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End at once: tearing down torch and its like takes the interpreter seconds, and honcho kills
    after five.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _live(role: Role, config: NodeConfig, build: Callable[[NodeConfig], Service], log: Log) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    started = time.monotonic()
    heartbeat = Heartbeat()
    context: ServiceContext | None = None
    node: Transport | None = None
    swarm: Transport | None = None

    def not_ready_because() -> str | None:
        if context is None:
            return "starting"
        if not context.node.connected:
            return "not connected to NATS"
        return None if context.ready else "setting up"

    registry = service_registry(lambda: not_ready_because() is None)
    planes = PlaneMetrics(registry)
    planes.watch("node", lambda: node)
    health = HealthServer(config.http.host, config.http_port(role), registry, heartbeat, not_ready_because)
    beating = asyncio.create_task(heartbeat.beat())
    try:
        node = await _connect_node_plane(config, role, stopping)
        if node is None:
            return
        if role == "verifier" and config.nats.swarm_url is not None:
            swarm = await _connect_swarm_plane(config, log)
        status = StatusBoard(config.node.id, role, config.node.replica)
        status.set(StatusFigure.HTTP_PORT, health.port)
        context = ServiceContext(config, role, config.node.replica, node, swarm, log, registry, status, stopping, planes=planes)
        log.info("started", pid=os.getpid(), http_port=health.port, seconds=round(time.monotonic() - started, 2))
        service = await asyncio.to_thread(build, config)
        reporting = asyncio.create_task(context.status.report(node))
        try:
            await service.run(context)
        except NotConnected as error:
            # Servers are asked to end at the same time as services are: what was not acknowledged
            # is handed out again.
            if not stopping.is_set():
                raise
            log.warning("stopped_without_server", reason=str(error))
        finally:
            await cancel_and_wait(reporting)
        context.status.state(STOPPED)
        await context.status.report_once(node)
        log.info("stopped")
    finally:
        await cancel_and_wait(beating)
        for plane in (node, swarm):
            if plane is not None:
                await plane.close()
        health.close()


async def _connect_node_plane(config: NodeConfig, role: Role, stopping: asyncio.Event) -> Transport | None:
    attempt = asyncio.create_task(_open_node_plane(config, role))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({attempt, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not attempt.done():
        await cancel_and_wait(attempt)
        return None
    await cancel_and_wait(stop)
    try:
        return attempt.result()
    except (NotConnected, AccessDenied, MissingStreams) as error:
        raise FatalError(str(error)) from None


async def _open_node_plane(config: NodeConfig, role: Role) -> Transport:
    transport = await connect_node_plane(config, role)
    await prepare_node_streams(transport, config.node.id, create=config.nats.create_streams, replicas=config.nats.replicas)
    return transport


async def _connect_swarm_plane(config: NodeConfig, log: Log) -> Transport | None:
    try:
        swarm = await connect_swarm_plane(config, "verifier", timeout_s=min(5.0, config.nats.connect_timeout_s))
        await prepare_swarm_streams(swarm, create=config.nats.create_streams, replicas=config.nats.swarm_replicas)
    except (AccessDenied, MissingStreams) as error:
        raise FatalError(f'{error}; or set nats.swarm_url = "none" to train alone') from None
    except NotConnected as error:
        log.warning("swarm_plane_away", reason=str(error), consequence="training alone until it is back")
        return None
    return swarm

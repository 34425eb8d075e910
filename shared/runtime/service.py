"""The life of a service process: configuration, logs, health port, NATS, work, orderly shutdown.

Exit codes: 0: finished, or stopped by SIGTERM or SIGINT; 74 (`EXIT_UNSAVED`): stopped, and its last
state could not be saved; 78 (`EXIT_CONFIG`): it cannot continue and
a restart would not help; 1: crashed. Every process sets up the streams when it starts
(idempotently), because nothing guarantees which process starts first.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import structlog
from prometheus_client import CollectorRegistry

from shared.cancelling import StillRunningError, cancel_and_wait
from shared.config.load import ConfigError, load
from shared.config.node_sections import ProcessConfig
from shared.contracts.status_figures import STOPPED
from shared.contracts.streams import MissingStreams, prepare_node_streams
from shared.lease.folder import FolderLock
from shared.lease.holder import Lease
from shared.lease.name import NameTaken, check_name
from shared.registry import ignored_entries
from shared.roles import Role
from shared.runtime.exits import EXIT_CONFIG, EXIT_UNSAVED, FILE_VARIABLE, FatalError, note_death
from shared.runtime.health import HealthServer, Heartbeat, until_listening
from shared.runtime.logs import Log, configure_logging
from shared.runtime.metrics import PlaneMetrics, service_registry
from shared.runtime.naming import leased, lock_folder, status_replica, take_lease
from shared.runtime.planes import REFUSED_S, connect_node_plane
from shared.runtime.status import ClockSkew, StatusBoard
from shared.runtime.streams import KnownStreams, StreamsReplaced, refuse_empty_store
from shared.runtime.writes import SyncMetrics, Writes
from shared.transport.base import AccessDenied, NotConnected, Transport


@dataclass
class ServiceContext:
    """Parts that the runtime passes to a service."""

    config: ProcessConfig
    role: Role
    replica: str
    node: Transport
    """Node plane: connected, the node's streams exist, and writes fail once this process has lost
    its lease.
    """
    log: Log
    registry: CollectorRegistry
    status: StatusBoard
    stopping: asyncio.Event
    ready: bool = field(default=False)
    unsaved: bool = field(default=False)
    """The service ends without having saved its last state (exit code `EXIT_UNSAVED`)."""
    planes: PlaneMetrics = field(default_factory=PlaneMetrics)
    writes: Writes = field(init=False)

    def __post_init__(self) -> None:
        """Everything that this process writes is told in one way."""
        self.writes = Writes(self.role, self.registry, self.status, self.log)

    def mark_ready(self) -> None:
        self.ready = True


class Service(Protocol):
    """The work of one role."""

    async def run(self, context: ServiceContext) -> None:
        """Do all the work; return soon after `context.stopping` is set, or when finished for good.

        Raises:
            FatalError: it cannot continue, and a restart would not help.
        """
        ...


C = TypeVar("C", bound=ProcessConfig)


def main(role: Role, kind: type[C], build: Callable[[C], Service]) -> NoReturn:
    """Run one service in its own process: `python -m services.<role> [--config FILE]`. kind: the
    part of the configuration that it reads.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=f"The {role} of one swarm node.")
    parser.add_argument("--config", type=Path, help="the node's TOML file (default: the file named by SWARM_CONFIG)")
    arguments = parser.parse_args()
    try:
        config = load(kind, arguments.config)
    except ConfigError as error:
        print(f"{role}: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    configure_logging(level=config.log.level, log_format=config.log.format, file=config.node.run_dir / f"{role}.log")
    log = structlog.get_logger(role).bind(node=config.node.id, role=role)
    for sentence in ignored_entries(config.entries(), role):
        log.warning("entry_point_ignored", reason=sentence)
    try:
        code = asyncio.run(_live(role, config, build, log))
    except FatalError as error:
        log.error("cannot_go_on", reason=str(error))
        if file := os.environ.get(FILE_VARIABLE):
            note_death(Path(file), EXIT_CONFIG, None, str(error))
        _leave(EXIT_CONFIG)
    except KeyboardInterrupt:
        _leave(0)
    except StreamsReplaced:
        _leave(1)
    except Exception:
        log.exception("crashed")
        _leave(1)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit at once: the interpreter takes seconds to tear down torch and similar libraries, and
    honcho kills after five.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _live(role: Role, config: C, build: Callable[[C], Service], log: Log) -> int:
    """Run from installing the signal handlers to the last status. The health server starts first
    and stops last, so that a probe can always learn why the process is not ready. Returns the exit
    code.
    """
    stopping = asyncio.Event()
    stop_requested_at, asked_s = 0.0, math.inf

    def stop() -> None:
        nonlocal stop_requested_at, asked_s
        if not stopping.is_set():
            stop_requested_at, asked_s = time.time(), time.monotonic()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    started = time.monotonic()
    heartbeat = Heartbeat()
    context: ServiceContext | None = None
    plane: Transport | None = None
    folder: FolderLock | None = None
    known: KnownStreams | None = None
    replica = status_replica(role, config.node.replica)
    status = StatusBoard(config.node.id, role, replica, config.node.role_names)

    def not_ready_because() -> str | None:
        if context is None:
            return status.snapshot().state
        if not context.node.connected:
            return "not connected to NATS"
        if known is not None and known.missing:
            return f"streams are gone: {', '.join(known.missing)}"
        return None if context.ready else "setting up"

    registry = service_registry(lambda: not_ready_because() is None, config.node.run, lambda: stop_requested_at)
    clock = ClockSkew(registry)
    SyncMetrics(registry)
    planes = PlaneMetrics(registry)
    planes.watch("node", lambda: plane)
    planes.streams_lost = lambda: len(known.missing) if known is not None else 0
    where, port = config.http.host, config.http_port(role)
    health = await until_listening(
        lambda: HealthServer(where, port, registry, heartbeat, not_ready_because), where, port, stopping, log
    )
    if health is None:
        return 0
    beating = asyncio.create_task(heartbeat.beat())
    try:
        folder = await lock_folder(config, role, log)
        joined = await _join_node_plane(config, status, folder.place if folder else "", log, stopping)
        if joined is None:
            return 0
        plane, lease, known = joined
        async with leased(plane, lease, config, role, log) as node:
            context = ServiceContext(config, role, replica, node, log, registry, status, stopping, planes=planes)
            log.info("started", pid=os.getpid(), http_port=health.port, seconds=round(time.monotonic() - started, 2))
            await _work(await asyncio.to_thread(build, config), context, lease, known, clock)
            context.status.state(STOPPED)
            await context.status.report_once(node)
        log.info("stopped")
        return EXIT_UNSAVED if context.unsaved else 0
    except NameTaken as error:
        raise FatalError(str(error)) from None
    finally:
        await cancel_and_wait(beating)
        if plane is not None:
            await plane.close()
        if stop_requested_at:
            await health.last_scrape(asked_s)
        health.close()
        if folder is not None:
            folder.close()


async def _work(service: Service, context: ServiceContext, lease: Lease, known: KnownStreams, clock: ClockSkew) -> None:
    """Run the service for as long as this process holds the node's name. Raises FatalError if
    another process has taken over the name, StreamsReplaced if the node's streams are others now,
    and what the service raises.
    """
    reporting = asyncio.create_task(context.status.report(context.node, context.log, clock))
    working, lost = asyncio.create_task(service.run(context)), asyncio.create_task(lease.lost.wait())
    watching = asyncio.create_task(known.watch(lease.hold_back))
    try:
        await asyncio.wait({working, lost, watching}, return_when=asyncio.FIRST_COMPLETED)
        if lease.lost.is_set():
            raise FatalError(lease.loss)
        await (watching if watching.done() else working)
    except NotConnected as error:
        # NATS servers are often stopped together with the services. Nothing is lost: messages that
        # were not acknowledged are delivered again.
        if not context.stopping.is_set():
            raise
        context.log.warning("stopped_without_server", reason=str(error))
    finally:
        try:
            await cancel_and_wait(reporting, lost, watching, working)
        except StillRunningError as error:
            context.log.warning("work_goes_on", reason=str(error), consequence="the process ends anyway")


async def _join_node_plane(
    config: ProcessConfig, status: StatusBoard, place: str, log: Log, stopping: asyncio.Event
) -> tuple[Transport, Lease, KnownStreams] | None:
    """The node plane, this process's lease on it, and its streams, which exist; None if the process
    is stopped in the meantime.
    """
    attempt = asyncio.create_task(_open_node_plane(config, status, place, log))
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


async def _open_node_plane(
    config: ProcessConfig, status: StatusBoard, place: str, log: Log
) -> tuple[Transport, Lease, KnownStreams]:
    """The parts that `_join_node_plane` waits for, in the order in which nothing is written before
    the name is known to be this run's.
    """
    nats, node, role = config.nats, config.node, status.role
    transport = await connect_node_plane(config, role, refused_s=REFUSED_S)
    try:
        await check_name(transport, node.id, node.run, nats.node_url)
        await refuse_empty_store(transport, node.run_dir, nats.node_url)
        await prepare_node_streams(transport, node.id, create=nats.create_streams, replicas=nats.replicas)
        known = KnownStreams(transport, node.id, nats.node_url, log)
        await known.remember(role, node.run_dir)
        return transport, await take_lease(transport, config, status, place, log), known
    except BaseException:
        await transport.close()
        raise

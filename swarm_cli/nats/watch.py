"""`swarm nats watch`: receives JetStream's advisories about requests in every account of a server,
and counts and logs requests that nobody should make.

Run one process per server or cluster. Its key may receive these advisories and do nothing else.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import nats.errors
import structlog

from shared.advisories import Verdict, judge, parse
from shared.cancelling import cancel_and_wait
from shared.identity.permissions import ADVISORY
from shared.runtime.health import HealthServer, Heartbeat
from shared.runtime.metrics import service_registry
from shared.runtime.tasks import run_until_stopped, sleep_unless_stopped
from shared.runtime.watch_figures import Figures
from shared.transport.nats.connection import Connection, Options
from swarm_cli.nats.server_certificates import follow

log = structlog.get_logger(__name__)

LOOK_S = 1.0
_SHOWN_CHARS = 200


class Watch:
    """Subscribes to the advisories on a connection, and again after each reconnect."""

    def __init__(self, connection: Connection, figures: Figures) -> None:
        self._connection = connection
        self._figures = figures
        self._listening_on: Any = None

    @property
    def listening(self) -> bool:
        """Whether an advisory would be received now."""
        return self._connection.connected and self._listening_on is self._connection.client

    async def run(self, stopping: asyncio.Event) -> None:
        """Listen until `stopping` is set."""
        while not stopping.is_set():
            await self._listen()
            self._figures.listening.set(self.listening)
            await sleep_unless_stopped(stopping, LOOK_S)

    async def _listen(self) -> None:
        client = self._connection.client
        if client is self._listening_on or not self._connection.connected:
            return
        with suppress(nats.errors.Error):
            await client.subscribe(f"*.{ADVISORY}", cb=self._hear)
            await client.flush(timeout=5)
            self._listening_on = client

    async def _hear(self, message: Any) -> None:
        account = message.subject.partition(".")[0]
        request = parse(message.data)
        if request is None:
            self._figures.unreadable.inc()
            log.warning("advisory_unreadable", account=account, start=repr(message.data[:_SHOWN_CHARS]))
            return
        verdict = judge(account, request)
        self._figures.requests.labels(verdict.value).inc()
        # Quoted, because the requester chose parts of it.
        told = {"subject": request.subject[:_SHOWN_CHARS], "by": str(request.client)[: 2 * _SHOWN_CHARS]}
        quoted = {name: repr(text) for name, text in told.items()}
        if verdict is Verdict.UNEXPECTED:
            log.error("nats_unexpected_request", account=account, **quoted)
        elif verdict is Verdict.OPERATOR:
            log.info("nats_operator_request", account=account, **quoted)


async def watch(options: Options, host: str, port: int, *, timeout_s: float, monitors: Sequence[str] = ()) -> None:
    """Connect and watch until SIGTERM. Raises the errors of connecting and of opening the port.
    `monitors`: monitoring ports of servers whose certificates to watch as well.
    """
    stopping, heartbeat = asyncio.Event(), Heartbeat()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    connection = Connection(options)
    watching: list[Watch] = []

    def not_ready_because() -> str | None:
        return None if watching and watching[0].listening else "not listening to the server's advisories"

    registry = service_registry(lambda: not_ready_because() is None)
    figures = Figures(registry)
    watching.append(Watch(connection, figures))
    server = HealthServer(host, port, registry, heartbeat, not_ready_because)
    beating = asyncio.create_task(heartbeat.beat())
    try:
        await connection.open(timeout_s)
        log.info("watching", url=options.url, metrics_port=server.port)
        asking = [follow(monitors, figures, stopping)] if monitors else []
        await run_until_stopped(stopping, watching[0].run(stopping), *asking)
    finally:
        await cancel_and_wait(beating)
        server.close()
        await connection.close()

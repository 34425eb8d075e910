"""`swarm nats watch`: count and log the requests to JetStream that nobody should make.

It runs beside a server and receives JetStream's advisories about requests in every account. Nothing
else shows them: an accepted request leaves no line in the server's log and no error in its figures.
Its key may receive advisories and do nothing else. Run one process per server or cluster."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import nats.errors
import structlog
import typer

from shared.advisories import Requester, judge, parse
from shared.cancelling import cancel_and_wait, run_until_stopped, sleep_unless_stopped
from shared.identity.permissions import ADVISORY
from shared.runtime.exits import FatalError
from shared.runtime.health import HealthServer, Heartbeat
from shared.runtime.logs import configure_logging
from shared.runtime.metrics import service_registry
from shared.runtime.watch_figures import Figures
from shared.transport.base import TransportError
from shared.transport.nats.connection import Connection, Options
from swarm_cli.errors import CommandError
from swarm_cli.nats.server_config import WATCH_ACCOUNT

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
        """Return whether an advisory would be received now."""
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
        if verdict is Requester.UNEXPECTED:
            log.error("nats_unexpected_request", account=account, **quoted)
        elif verdict is Requester.OPERATOR:
            log.info("nats_operator_request", account=account, **quoted)


async def watch(options: Options, host: str, port: int, *, timeout_s: float) -> None:
    """Connect and watch until SIGTERM. Raises the errors of connecting and of opening the port."""
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
        await run_until_stopped(stopping, watching[0].run(stopping))
    finally:
        await cancel_and_wait(beating)
        server.close()
        await connection.close()


def watch_requests(
    url: Annotated[str, typer.Option(help="The server, or several separated by commas.")],
    key: Annotated[Path, typer.Option(help="Key file of the user `watch`.")] = Path("keys/operator/watch.nk"),
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authority that signed the server's certificate.")] = None,
    host: Annotated[str, typer.Option(help="Address of /metrics, /livez and /readyz.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Their port; 0: any free.")] = 9405,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for the server when starting, in seconds.")] = 30.0,
) -> None:
    """Count and log every JetStream API request that neither a role nor an operator should have
    made.
    """
    configure_logging(level="info", log_format="auto")
    options = Options(
        url=url,
        name="watch",
        key_file=str(key),
        ca_file=str(ca) if ca is not None else None,
        inbox_prefix="_INBOX_watch",
        accounts=(WATCH_ACCOUNT,),
    )
    try:
        asyncio.run(watch(options, host, port, timeout_s=timeout_s))
    except (TransportError, FatalError) as error:
        raise CommandError(str(error)) from None

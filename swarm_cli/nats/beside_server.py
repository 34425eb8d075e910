"""`swarm nats watch` and `reload`: run beside a server as long as it runs."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from shared.runtime.errors import FatalError
from shared.runtime.logs import configure_logging
from shared.transport.base import TransportError
from shared.transport.nats.connection import Options
from swarm_cli.errors import CommandError
from swarm_cli.nats.reload import keep_reloading
from swarm_cli.nats.watch import watch


def watch_requests(
    url: Annotated[str, typer.Option(help="The server, or several separated by commas.")],
    key: Annotated[Path, typer.Option(help="Key file of the user `watch`.")] = Path("keys/operator/watch.nk"),
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authority that signed the server's certificate.")] = None,
    host: Annotated[str, typer.Option(help="Address of /metrics, /livez and /readyz.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Their port; 0: any free.")] = 9405,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for the server when starting, in seconds.")] = 30.0,
    monitor: Annotated[
        list[str] | None,
        typer.Option(help="Also watch when a server's certificate expires, by its monitoring port: http://HOST:8222."),
    ] = None,
) -> None:
    """Count and log every JetStream API request that neither a role nor an operator should have
    made.
    """
    configure_logging(level="info", log_format="auto")
    options = Options(
        url=url, name="watch", key_file=str(key), ca_file=str(ca) if ca is not None else None, inbox_prefix="_INBOX_watch"
    )
    try:
        asyncio.run(watch(options, host, port, timeout_s=timeout_s, monitors=monitor or []))
    except (TransportError, FatalError) as error:
        raise CommandError(str(error)) from None


def reload_when_changed(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders with files that the server reads: accounts, certificates.")
    ],
    pid_file: Annotated[Path, typer.Option(help="The file with the server's process id (pid_file).")] = Path("/run/nats/nats.pid"),
    every_s: Annotated[float, typer.Option(min=0.1, help="How often to check, in seconds.")] = 5.0,
) -> None:
    """Make a server reload its files whenever they change, until this command is ended.

    Each change causes two reloads, because nats-server 2.15.1 gives a new account its imports only
    at the second one. A server refuses a configuration with errors and keeps the one it has; its
    log says so.
    """
    configure_logging(level="info", log_format="auto")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    keep_reloading(folders, pid_file, every_s, stopping)

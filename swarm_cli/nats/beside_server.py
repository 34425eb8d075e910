"""`swarm nats watch` and `swarm nats reload`: run beside a server as long as it runs.

The watch receives JetStream's advisories about requests in every account of a server, and counts
and logs requests that nobody should make. Nothing else shows them: an accepted request leaves no
line in the server's log and no error in its figures. Its key may receive advisories and do nothing
else. Run one process per server or cluster.

The reload makes a server read its files again whenever they have changed. It runs in a container
beside the server, in the same process namespace: Kubernetes updates a Secret in the pod by itself,
but the server reads it only when it gets a signal. NATS's own reloader sends one signal, and
nats-server 2.15.1 gives a new account its imports only at the second."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import nats.errors
import structlog
import typer

from shared.advisories import Verdict, judge, parse
from shared.cancelling import cancel_and_wait, run_until_stopped, sleep_unless_stopped
from shared.identity.permissions import ADVISORY
from shared.plain_files import read_named
from shared.runtime.exits import FatalError
from shared.runtime.health import HealthServer, Heartbeat
from shared.runtime.logs import configure_logging
from shared.runtime.metrics import service_registry
from shared.runtime.watch_figures import Figures
from shared.text import error_text
from shared.transport.base import TransportError
from shared.transport.nats.answers import readable
from shared.transport.nats.connection import Connection, Options
from swarm_cli.errors import CommandError
from swarm_cli.server_diagnosis import answer, certificate_end, monitor_address

log = structlog.get_logger(__name__)

EVERY_S = 60.0
ANSWER_S = 5.0


def certificate_ends(monitors: Sequence[str]) -> dict[str, float]:
    """When each server's certificate expires, by the server's name. A host name may stand for
    several servers, such as that of a headless Service. Servers that do not answer are left out.
    """
    found: dict[str, float] = {}
    for url in (each for monitor in monitors for each in _each_address(monitor)):
        try:
            varz = answer(url, "varz", ANSWER_S)
            with readable("varz"):
                if (ends := certificate_end(varz)) is not None:
                    found[str(varz["server_name"])] = ends
        except TransportError as error:
            log.warning("server_not_asked", url=url, error=str(error))
    return found


async def follow_certificates(monitors: Sequence[str], figures: Figures, stopping: asyncio.Event) -> None:
    """Ask every `EVERY_S` until `stopping` is set."""
    while not stopping.is_set():
        found = await asyncio.to_thread(certificate_ends, monitors)
        figures.certificates.clear()
        for server, ends in found.items():
            figures.certificates.labels(server).set(ends)
        await sleep_unless_stopped(stopping, EVERY_S)


def _each_address(monitor: str) -> Iterator[str]:
    try:
        parts = monitor_address(monitor)
        found = socket.getaddrinfo(parts.hostname, parts.port or 8222, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TransportError) as error:
        log.warning("server_not_asked", url=monitor, error=error_text(error))
        return
    for host in sorted({str(address[0]) for *_, address in found}):
        yield f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port or 8222}"


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
        asking = [follow_certificates(monitors, figures, stopping)] if monitors else []
        await run_until_stopped(stopping, watching[0].run(stopping), *asking)
    finally:
        await cancel_and_wait(beating)
        server.close()
        await connection.close()


SIGNALS = 2
"""nats-server 2.15.1 gives a new account its imports only at the second reload."""
BETWEEN_S = 5.0
_MOST_PROCESSES = 2**22
"""The highest process id that Linux gives."""
_PID_BYTES = 100


class Reloads:
    """Decides when to signal a server, from the contents of its files and the time."""

    def __init__(self, known: str | None) -> None:
        """`known`: digest of the files that the server has read; None if they have
        changed since.
        """
        self._known = known
        self._left = 0
        self._next_at = 0.0

    def due(self, found: str, now: float) -> bool:
        """Return whether to signal the server. `found`: digest of its files; `now` in seconds."""
        if found != self._known:
            self._known, self._left, self._next_at = found, SIGNALS, now
        return self._left > 0 and now >= self._next_at

    def signalled(self, now: float) -> None:
        """Count a signal."""
        self._left -= 1
        self._next_at = now + BETWEEN_S


def digest(folders: Iterable[Path]) -> str:
    """Digest of the names and contents of all files in the folders, except hidden ones: Kubernetes
    keeps the versions of a Secret in hidden folders and links to the newest.

    Raises:
        OSError: a file cannot be read, for example while Kubernetes is exchanging them.
    """
    found = hashlib.sha256()
    for path in _files(folders):
        content = path.read_bytes()
        found.update(f"{path}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def newest_s(folders: Iterable[Path]) -> float:
    """When the newest of these files was written, in seconds since 1970; 0 without files."""
    return max((path.stat().st_mtime for path in _files(folders)), default=0.0)


def _files(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())


def server_process(text: str) -> int:
    """The process id in a pid file.

    Raises:
        ValueError: it cannot be a server's id. 0 and negative numbers stand for groups of
        processes,
            and 1 for the pod's or the machine's init process: a signal would hit other processes.
    """
    number = int(text)
    if not 1 < number <= _MOST_PROCESSES:
        raise ValueError(f"the pid file says {number}, which cannot be a server's id: let the server write it (pid_file)")
    return number


def keep_reloading(folders: list[Path], pid_file: Path, every_s: float, stopping: threading.Event) -> None:
    """Check every `every_s` seconds until `stopping` is set. A failure is logged when it first
    occurs or changes, and tried again: if this container ended, Kubernetes would take the server
    beside it out of its Service.
    """
    reloads: Reloads | None = None
    reported = ""
    clock_s = 0.0
    while not stopping.wait(every_s if reloads is not None else min(every_s, 1.0)):
        clock_s += every_s
        try:
            found = digest(folders)
            if reloads is None:
                # The server may not have read files that were written after it started.
                reloads = Reloads(None if newest_s(folders) > pid_file.stat().st_mtime else found)
                log.info("nats_reload_watching", folders=[str(folder) for folder in folders])
            if reloads.due(found, clock_s):
                os.kill(server_process(read_named(pid_file, _PID_BYTES).decode()), signal.SIGHUP)
                reloads.signalled(clock_s)
                log.info("nats_reloaded", files=found[:12], consequence="the server's own log says whether it took them")
            reported = ""
        except (OSError, ValueError) as error:
            if reported != (reported := str(error)):
                log.warning("nats_reload_delayed", reason=reported, consequence="tried again")


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

"""Asks a NATS server at its monitoring port how it is, and finds that port of a run on this
machine.

What answers there may be anything: another program, the server's port for clients, somebody who
sends a byte a second or never ends."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from shared.os_words import in_words
from shared.plain_files import read_plain
from shared.transport.base import TransportError
from shared.transport.nats.answers import answer_object, readable, said
from swarm_cli.chosen_config import LOOPBACK

TIMEOUT_S = 1.5
"""Less than the time between two scrapes."""
RENEWED_S = 30 * 86_400.0
"""A certificate with less time left should be renewed, as `swarm k8s secrets` does."""
_MOST_MIB = 16
_LINES = {"http": (http.client.HTTPConnection, 80), "https": (http.client.HTTPSConnection, 443)}
_EXAMPLE = "give http://HOST:8222"
_NOTES_BYTES = 65_536
STORAGE_NEARLY_FULL = 0.85
"""The same threshold as the alert NatsJetStreamStorageHigh's."""


def monitor_of(node_url: str, var_dir: Path) -> str | None:
    """Monitoring address of the server at `node_url`, if `swarm up` started it: the server writes
    the address into its run's folder. None if it is no run's server.

    Somebody else's run may hold any file, so only the note of a process that serves that very
    folder counts, and only an address on this machine.
    """
    port = urlsplit(node_url).port
    notes = [note for run in (var_dir / "runs").glob("*") for note in run.glob("nats-server_*.ports")]
    for note in notes:
        try:
            written = json.loads(read_plain(note, _NOTES_BYTES))
            if any(urlsplit(url).port == port for url in written["nats"]) and _served_by(note):
                return next((url for url in written["monitoring"] if _is_here(url)), None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # the file is being written, or its server ended a moment ago
    return None


def _served_by(note: Path) -> bool:
    """Whether the process whose id is in the note's name was started with the note's folder as an
    argument. Raises OSError if there is no such process.
    """
    process = Path("/proc", str(int(note.stem.removeprefix("nats-server_"))))
    words = (process / "cmdline").read_bytes().split(b"\0")
    folder, at = note.parent.resolve(), (process / "cwd").resolve(strict=True)
    return any((at / os.fsdecode(word)).resolve() == folder for word in words if word)


def _is_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname in LOOPBACK


def health(monitor_url: str) -> tuple[str, str]:
    """What the server says of itself: `ok` or another status, and why it is not well. Raises as
    `answer`.
    """
    told = answer(monitor_url, "healthz", TIMEOUT_S)
    with readable("healthz"):
        return str(told["status"]), str(told.get("error", ""))


def monitor_address(url: str) -> SplitResult:
    """The parts of a monitoring port's address. Raises TransportError if it is none."""
    try:
        parts = urlsplit(url)
        if parts.scheme in _LINES and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass
    raise TransportError(f"this is no address of a monitoring port: {_EXAMPLE}")


def answer(monitor_url: str, page: str, timeout_s: float) -> dict[str, Any]:
    """The JSON object that is a page of a monitoring port, whatever its status: that of /healthz is
    503, with the same body, if the server is not healthy.

    Raises:
        TransportError: it is none, or did not come as a whole within `timeout_s`; the message does
            not name `monitor_url`.
    """
    parts = monitor_address(monitor_url)
    try:
        text = _text(parts, f"{parts.path.rstrip('/')}/{page}", timeout_s)
    except (OSError, ValueError) as error:
        raise TransportError(said(in_words(error))) from None
    except http.client.HTTPException as error:
        if str(error).startswith("INFO "):  # a NATS server greets its clients so
            raise TransportError(f"NATS clients connect to this port, it is not the monitoring port: {_EXAMPLE}") from None
        raise TransportError(f"what answers there is not a monitoring port ({said(in_words(error))}): {_EXAMPLE}") from None
    return answer_object(text, page)


def _text(parts: SplitResult, path: str, timeout_s: float) -> bytes:
    """The body of the answer. Connects directly: what is asked is inside, where proxies are not."""
    ends = time.monotonic() + timeout_s
    kind, port = _LINES[parts.scheme]
    line = kind(parts.hostname or "", parts.port or port, timeout=timeout_s)
    with closing(line):
        line.connect()
        with _cut_at(ends, line.sock):
            line.request("GET", path, headers={"Connection": "close"})
            with line.getresponse() as told:
                text: bytes = told.read(_MOST_MIB * 2**20 + 1)
    if len(text) > _MOST_MIB * 2**20:
        raise ValueError(f"its answer has more than {_MOST_MIB} MiB")
    return text


@contextmanager
def _cut_at(moment: float, line: socket.socket) -> Iterator[None]:
    """End what the block reads at that moment, and raise TimeoutError: with a socket's own timeout,
    each byte begins the wait for the next one anew.
    """
    overdue = threading.Event()

    def cut() -> None:
        overdue.set()
        with suppress(OSError):
            socket.socket.shutdown(line, socket.SHUT_RDWR)  # a TLS line's own would also take the session from its reader

    timer = threading.Timer(max(0.0, moment - time.monotonic()), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if overdue.is_set():
            raise TimeoutError("timed out")


@dataclass(frozen=True, slots=True)
class Server:
    """A server's figures. `problem`: why it could not be asked; then the rest is empty."""

    url: str
    problem: str = ""
    name: str = ""
    version: str = ""
    uptime: str = ""
    health: str = ""
    connections: int = 0
    slow_consumers: int = 0
    memory_bytes: int = 0
    store_bytes: int = 0
    store_most_bytes: int = 0
    reserved_bytes: int = 0
    leader: str | None = None
    """Leader of the cluster; None for a single server, empty if there is no leader."""
    offline: tuple[str, ...] = ()
    certificate_end: float | None = None
    """Unix time at which the certificate that it presents now expires; None without TLS."""

    def findings(self) -> Iterator[str]:
        """A sentence for each thing that is wrong with it."""
        if self.problem:
            yield f"monitoring port {self.url} does not answer: {self.problem}"
            return
        if self.health != "ok":
            yield f"server {self.name} is not healthy: {self.health}"
        if self.leader == "":
            yield f"server {self.name} knows no leader of the cluster: no stream can be made or changed"
        for name in self.offline:
            yield f"server {name} is offline, according to {self.name}"
        if self.certificate_end is not None and self.certificate_end < time.time() + RENEWED_S:
            ends = time.strftime("%Y-%m-%d", time.gmtime(self.certificate_end))
            yield f"the certificate of server {self.name} expires on {ends}: renew it, and reload the server"
        yield from storage_finding(f"server {self.name}", self.store_bytes, self.store_most_bytes)


def ask(url: str) -> Server:
    """A server's figures. Never raises: if the server does not answer, `problem` says why."""
    try:
        about, stored, health = (answer(url, page, 2 * TIMEOUT_S) for page in ("varz", "jsz", "healthz"))
        with readable("varz, jsz and healthz"):
            meta = stored.get("meta_cluster")
            copies = (meta or {}).get("replicas") or []
            return Server(
                url=url,
                name=str(about["server_name"]),
                version=str(about["version"]),
                uptime=str(about["uptime"]),
                health=str(health["status"] if health["status"] == "ok" else health.get("error") or health["status"]),
                connections=int(about["connections"]),
                slow_consumers=int(about["slow_consumers"]),
                memory_bytes=int(about["mem"]),
                store_bytes=int(stored["storage"]),
                store_most_bytes=int(stored["config"]["max_storage"]),
                reserved_bytes=int(stored["reserved_storage"]),
                leader=None if meta is None else str(meta.get("leader") or ""),
                certificate_end=certificate_end(about),
                offline=tuple(str(each.get("name")) for each in copies if each.get("offline")),
            )
    except TransportError as error:
        return Server(url=url, problem=str(error))


def certificate_end(varz: dict[str, Any]) -> float | None:
    """Unix time at which a server's certificate expires, from its page /varz; None if it has none.
    Raises ValueError if the value is not a date.
    """
    text = str(varz.get("tls_cert_not_after") or "")
    # Go's zero time stands for no certificate.
    return datetime.fromisoformat(text).timestamp() if text and not text.startswith("0001-") else None


def storage_finding(whose: str, used: int, most: int) -> Iterator[str]:
    """Whether a store is nearly full. `most` below 1: no limit."""
    if most > 0 and used / most >= STORAGE_NEARLY_FULL:
        yield f"{whose} has used {used / most:.0%} of its JetStream storage; at 100 % every stream refuses messages"

"""When servers' certificates expire, read from the servers' monitoring ports (`tls_cert_not_after`
of /varz).

Why here: prometheus-nats-exporter passes on numbers and two dates of /varz, but not this one (0.18,
`objectToMetrics`). A connected process sees only the certificate of its connection, which may be
older than the one that the server presents now.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import structlog

from shared.os_words import in_words
from shared.runtime.tasks import sleep_unless_stopped
from shared.runtime.watch_figures import Figures
from shared.transport.base import TransportError
from shared.transport.nats.answers import readable
from swarm_cli.nats_monitor import answer, monitor_address

log = structlog.get_logger(__name__)

EVERY_S = 60.0
ANSWER_S = 5.0


def not_after(varz: dict[str, Any]) -> float | None:
    """Unix time at which a server's certificate expires; None if it has none. Raises ValueError if
    the value is not a date.
    """
    said = str(varz.get("tls_cert_not_after") or "")
    # Go's zero time stands for no certificate.
    return datetime.fromisoformat(said).timestamp() if said and not said.startswith("0001-") else None


def ask(monitors: Sequence[str]) -> dict[str, float]:
    """When each server's certificate expires, by the server's name. A host name may stand for
    several servers, such as that of a headless Service. Servers that do not answer are left out.
    """
    found: dict[str, float] = {}
    for url in (each for monitor in monitors for each in _each_address(monitor)):
        try:
            varz = answer(url, "varz", ANSWER_S)
            with readable("varz"):
                if (ends := not_after(varz)) is not None:
                    found[str(varz["server_name"])] = ends
        except TransportError as error:
            log.warning("server_not_asked", url=url, error=str(error))
    return found


async def follow(monitors: Sequence[str], figures: Figures, stopping: asyncio.Event) -> None:
    """Ask every `EVERY_S` until `stopping` is set."""
    while not stopping.is_set():
        found = await asyncio.to_thread(ask, monitors)
        figures.certificates.clear()
        for server, ends in found.items():
            figures.certificates.labels(server).set(ends)
        await sleep_unless_stopped(stopping, EVERY_S)


def _each_address(monitor: str) -> Iterator[str]:
    try:
        parts = monitor_address(monitor)
        found = socket.getaddrinfo(parts.hostname, parts.port or 8222, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TransportError) as error:
        log.warning("server_not_asked", url=monitor, error=in_words(error))
        return
    for host in sorted({str(address[0]) for *_, address in found}):
        yield f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port or 8222}"

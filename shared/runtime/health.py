"""`/metrics`, `/livez` and `/readyz` of one process, served from a thread so that a blocked event
loop can be detected.

Liveness means that the event loop has run recently. It says nothing about NATS, because an
unreachable server must not restart a process that holds a model. Readiness means connected and set
up.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from shared.cancelling import sleep_unless_stopped
from shared.contracts.status_figures import SILENT_S
from shared.runtime.exits import FatalError
from shared.runtime.logs import Log
from shared.text import visible

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def port_holder(port: int) -> str:
    """`, which process 123 (python3) has`, of a listening TCP port of this machine; empty if the
    system does not show who has it.
    """
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        with suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(each) in wanted for each in (process / "fd").iterdir()):
                name = (process / "comm").read_text().strip()
                return f", which process {process.name} ({visible(name, 40)}) has"
    return ""


PORT_PATIENCE_S, PORT_PAUSE_S = 30.0, 0.5

LONGEST_SCRAPE_S = 30.0
"""A process that stops waits no longer for one more scrape."""
SCRAPE_LATE_S = 5.0
"""On a busy machine a scrape comes so late."""
SCRAPES_KEPT, MOST_SCRAPERS = 4, 8


class Heartbeat:
    """Measures the time since the event loop last ran."""

    def __init__(self) -> None:
        self._beat = time.monotonic()

    async def beat(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(1.0)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._beat


class HealthServer:
    """HTTP server of one process. `port` is the port actually bound.

    Raises:
        OSError: the port is taken, or cannot be opened.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, heartbeat: Heartbeat, not_ready_because: Callable[[], str | None]
    ) -> None:
        from prometheus_client import make_wsgi_app  # commands that look at a port do without it

        self._metrics = make_wsgi_app(registry)
        self._heartbeat = heartbeat
        self._not_ready_because = not_ready_because
        self._scrapes: OrderedDict[str, deque[float]] = OrderedDict()
        self._server = make_server(host, port, self._answer, server_class=_Server, handler_class=_QuietHandler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    async def last_scrape(self, since: float) -> None:
        """Wait until everyone who reads `/metrics` regularly has read it after `since` (of
        `time.monotonic`): for each at most its usual interval, and for nobody longer than
        `LONGEST_SCRAPE_S`.
        """
        while True:
            if not self._awaited(since, time.monotonic()):
                return
            await asyncio.sleep(0.1)

    def _awaited(self, since: float, now: float) -> bool:
        """Check whether a read is still due."""
        for times in list(self._scrapes.values()):
            last = times[-1]
            # The longest: after a stall, two that waited are answered at once.
            usual_s = max((after - before for before, after in pairwise(times)), default=0.0)
            if last <= since and 0 < usual_s <= LONGEST_SCRAPE_S and now < last + usual_s + SCRAPE_LATE_S:
                return True
        return False

    def _scraped(self, client: str, began: float) -> None:
        times = self._scrapes.setdefault(client, deque(maxlen=SCRAPES_KEPT))
        times.append(began)
        self._scrapes.move_to_end(client)
        if len(self._scrapes) > MOST_SCRAPERS:
            self._scrapes.popitem(last=False)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Runs in the server's thread while the event loop may hang. `/livez` exists to report
        that, so nothing here may wait for the loop.
        """
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            began = time.monotonic()
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            self._scraped(environ.get("REMOTE_ADDR", ""), began)
            return answer
        if path == "/livez":
            age_s = self._heartbeat.age_s
            problem = f"event loop stalled for {age_s:.0f} s" if age_s > SILENT_S else None
        elif path == "/readyz":
            problem = self._not_ready_because()
        else:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"try /metrics, /livez or /readyz\n"]
        start_response("503 Service Unavailable" if problem else "200 OK", [("Content-Type", "text/plain")])
        return [f"{problem or 'ok'}\n".encode()]


async def until_listening(
    listen: Callable[[], HealthServer],
    where: str,
    port: int,
    stopping: asyncio.Event,
    log: Log,
    patience_s: float = PORT_PATIENCE_S,
) -> HealthServer | None:
    """The server that `listen` starts. A port that is taken is tried again for `patience_s`: what
    has it may be about to end, as this process's predecessor is after a kill. None if stopped.

    Raises:
        FatalError: it is still taken; names the process that has it, if the system shows it.
    """
    give_up_at, told = time.monotonic() + patience_s, False
    while True:
        try:
            return listen()
        except OSError as error:
            reason = f"metrics port {where}:{port} cannot be opened ({error.strerror}){port_holder(port)}"
            if error.errno != errno.EADDRINUSE or time.monotonic() > give_up_at:
                raise FatalError(
                    f"{reason}: end what has the port, or set http.base_port (SWARM_HTTP__BASE_PORT) to a free range"
                ) from None
            if not told:
                log.warning("metrics_port_taken", reason=reason, consequence=f"trying again for {patience_s:g} s")
                told = True
            if await sleep_unless_stopped(stopping, PORT_PAUSE_S):
                return None


class _Server(WSGIServer):
    # A port that another process listens on must be an error, even where SO_REUSEADDR would let
    # both bind.
    allow_reuse_address = True
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    timeout = 5

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""

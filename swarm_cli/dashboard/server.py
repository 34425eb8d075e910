"""Serves the page of `swarm dashboard`: static files, and the swarm's state as JSON.

It listens only on loopback, and refuses requests for any other host name: a web site can make its
own name resolve to 127.0.0.1 and then read this page in its visitor's browser (DNS rebinding).
"""

from __future__ import annotations

import sys
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/swarm.js": ("swarm.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/learning.js": ("learning.js", "text/javascript; charset=utf-8"),
    "/group.js": ("group.js", "text/javascript; charset=utf-8"),
    "/swarm.css": ("swarm.css", "text/css; charset=utf-8"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing that a node wrote can run, even if the page failed to treat it as plain text."""
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


Ask = Callable[[str, Mapping[str, str]], tuple[int, bytes] | None]
"""Answers requests about the swarm: path and query to status and JSON, None for another path.
Called from several threads.
"""


class PageServer:
    """Serves the page on 127.0.0.1:`port` from a thread, until closed. `port` 0 takes any free
    port; `url` has the actual one.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, ask: Ask) -> None:
        """`ask`: answers about the swarm."""

        class Handler(_Handler):
            swarm = staticmethod(ask)

        self._server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes a page in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    swarm: Ask
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if not self._asked_here():
            self._answer(403, "text/plain; charset=utf-8", b"open this page as 127.0.0.1 or localhost\n")
        elif not self.path.isascii():
            self._answer(400, "text/plain; charset=utf-8", b"the address has characters that need percent-encoding\n")
        elif path in FILES:
            name, kind = FILES[path]
            self._answer(200, kind, _file(name))
        elif (told := self.swarm(path, _fields(query))) is not None:
            self._answer(told[0], "application/json", told[1])
        else:
            self._answer(404, "text/plain; charset=utf-8", b"there is nothing here\n")

    def _asked_here(self) -> bool:
        """Not by another site's page, which could have its visitor's browser ask for group after
        group as if they were pictures; a link there may lead here.
        """
        if self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and self.headers.get("Sec-Fetch-Dest") != "document":
            return False
        origin = self.headers.get("Origin")
        hosts = {(self.headers.get("Host") or "").rpartition(":")[0]}
        if origin is not None:
            hosts.add(origin.removeprefix("http://").rpartition(":")[0])
        return hosts <= set(LOOPBACK_NAMES)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line per query would bury important lines."""


def _fields(query: str) -> dict[str, str]:
    try:
        return dict(urllib.parse.parse_qsl(query, max_num_fields=16))
    except ValueError:  # more fields than our pages send
        return {}


@cache
def _file(name: str) -> bytes:
    return (PAGE / name).read_bytes()

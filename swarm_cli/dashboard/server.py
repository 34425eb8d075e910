"""Serves the page of `swarm dashboard`: static files, the swarm's state, the panels, and
Prometheus' query API and pages at the same address.

It listens only on loopback, and refuses requests for any other host name: a web site can make its
own name resolve to 127.0.0.1 and then read this page in its visitor's browser (DNS rebinding).
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from monitoring.dashboards import Dashboard
from swarm_cli.dashboard.prometheus import PREFIX
from swarm_cli.dashboard.runbooks import runbook

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/swarm.js": ("swarm.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/group.js": ("group.js", "text/javascript; charset=utf-8"),
    "/runbook.js": ("runbook.js", "text/javascript; charset=utf-8"),
    "/swarm.css": ("swarm.css", "text/css; charset=utf-8"),
    "/panels": ("panels.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/units.js": ("units.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
    "/uPlot.LICENSE": ("uPlot.LICENSE", "text/plain; charset=utf-8"),
}
PASSED_ON = ("/api/v1/query", "/api/v1/query_range", "/api/v1/alerts", "/api/v1/rules")
NATS_FIGURES = "/nats/metrics"
QUERY_TIMEOUT_S = 30.0
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


def page_panels(dashboards: Sequence[Dashboard], scrape_s: int, *, prometheus: bool = True) -> dict[str, Any]:
    """The data for the panels' page: the same dashboards as Grafana's, the seconds between samples,
    and whether there is a Prometheus.
    """
    return {"dashboards": [asdict(dashboard) for dashboard in dashboards], "scrape_s": scrape_s, "prometheus": prometheus}


def nothing_known(path: str, query: Mapping[str, str]) -> None:
    """For a page with panels only: answers nothing about the swarm."""


class PageServer:
    """Serves the page on 127.0.0.1:`port` from a thread, until closed. `port` 0 takes any free
    port; `url` has the actual one.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self,
        port: int,
        prometheus_url: str,
        panels: dict[str, Any],
        client: ssl.SSLContext | None = None,
        nats_figures: Callable[[], str] = str,
        ask: Ask = nothing_known,
    ) -> None:
        """`prometheus_url`: empty if there is none; `client`: how to reach it if it uses TLS.
        `nats_figures`: the metrics that are scraped as job `nats`. `ask`: answers about the swarm.
        """
        body = json.dumps(panels).encode()
        self._expected = _Expected()
        processes = self._expected
        # No proxy, whatever the environment says, and no redirects: the browser follows those, not
        # this process.
        asked = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=client), _NoRedirect()
        )

        class Handler(_Handler):
            upstream = prometheus_url
            panels_json = body
            opener = asked
            expected = processes
            nats = staticmethod(nats_figures)
            swarm = staticmethod(ask)

        self._server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()

    def expect(self, processes: Sequence[dict[str, str]]) -> None:
        """Set the processes that should be running; the page shows how many of them answer."""
        self._expected.body = json.dumps(list(processes)).encode()

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


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Turn the redirect into an HTTPError, which is passed on to the browser."""


class _Expected:
    body = b"[]"


class _Handler(BaseHTTPRequestHandler):
    upstream = ""
    panels_json = b""
    expected: _Expected
    nats: Callable[[], str]
    opener: urllib.request.OpenerDirector
    swarm: Ask = staticmethod(nothing_known)
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
        elif path == "/panels.json":
            self._answer(200, "application/json", self.panels_json)
        elif path == "/expected.json":
            self._answer(200, "application/json", self.expected.body)
        elif path == "/runbook.json":
            status, told_of = runbook(_fields(query).get("name", ""))
            self._answer(status, "application/json", told_of)
        elif path == NATS_FIGURES:
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.nats().encode())
        elif path in PASSED_ON:
            self._pass_on(path, query)
        elif path.startswith(f"{PREFIX}/"):
            self._pass_on(path.removeprefix(PREFIX), query, whole=True)
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

    def _pass_on(self, path: str, query: str, *, whole: bool = False) -> None:
        """Pass a request on to Prometheus. `whole`: for one of its own pages, which needs its own
        content type, scripts and redirects.
        """
        if not self.upstream:
            self._answer(503, None, json.dumps({"status": "error", "error": "Prometheus is not installed"}).encode())
            return
        try:
            with self.opener.open(f"{self.upstream}{path}{'?' if query else ''}{query}", timeout=QUERY_TIMEOUT_S) as answer:
                self._answer(answer.status, answer.headers.get("Content-Type") if whole else None, answer.read(), whole=whole)
        except urllib.error.HTTPError as error:
            where = error.headers.get("Location") if whole else None
            self._answer(
                error.code, error.headers.get("Content-Type") if whole else None, error.read(), whole=whole, location=where
            )
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            told = {"status": "error", "error": f"Prometheus does not answer ({error})"}
            self._answer(502, None, json.dumps(told).encode())

    def _answer(self, status: int, kind: str | None, body: bytes, *, whole: bool = False, location: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind or "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if location is not None:
            self.send_header("Location", location)
        if not whole:
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

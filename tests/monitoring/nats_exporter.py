"""Serves a real NATS server's figures as prometheus-nats-exporter would, which is a Go program that
cannot be had here (`swarm_cli.dashboard.nats_figures` names things as its sources do).
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from swarm_cli.dashboard.nats_figures import figures


class NatsExporter:
    """Serves the text at `address`, in a thread."""

    def __init__(self, monitor_url: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the method's name is the library's
                body = figures(monitor_url).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not worth a line."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

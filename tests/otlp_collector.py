"""A collector of OpenTelemetry spans over HTTP and protobuf, like a real one."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Received:
    service: str
    node: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    attributes: dict[str, Any]
    links: tuple[str, ...]


@dataclass
class Collector:
    url: str = ""
    paths: set[str] = field(default_factory=set)
    spans: list[Received] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            said = _plain(resource.resource.attributes)
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.spans.append(
                    Received(
                        said["service.name"],
                        said["swarm.node"],
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        _plain(span.attributes),
                        tuple(link.trace_id.hex() for link in span.links),
                    )
                )


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.paths.add(self.path)
            collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()

"""Serves a real NATS server's figures as prometheus-nats-exporter would, which is a Go program that
cannot be had here. It reads the server's monitoring port and uses the exporter's names
(`collector.go`, `jsz.go` and `healthz.go` in `collector/`, June 2026), with
`-varz -jsz=all -healthz -prefix=nats -use_internal_server_name`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shared.transport.base import TransportError
from shared.transport.nats.answers import readable
from swarm_cli.server_diagnosis import TIMEOUT_S, answer, health

_STREAM = {"total_messages": "messages", "total_bytes": "bytes", "first_seq": "first_seq", "last_seq": "last_seq"}
_STREAM |= {"consumer_count": "consumer_count", "subject_count": "num_subjects"}
_CONSUMER = ("num_ack_pending", "num_redelivered", "num_waiting", "num_pending")
_SERVER = {"total_streams": "streams", "total_consumers": "consumers", "total_messages": "messages", "total_message_bytes": "bytes"}

_NAME = re.compile("[A-Za-z0-9_/]+")


def figures(monitor_url: str) -> str:
    """The text that Prometheus scrapes. Never raises: a server that does not answer is reported the
    way the exporter does, so that its alert fires.
    """
    try:
        return exposition(monitor_url)
    except TransportError:
        return _line("nats_healthz_status_value", 0.0, {"server_id": "", "value": "unreachable"}) + "\n"


def exposition(monitor_url: str) -> str:
    """The figures of the server whose monitoring port is at `monitor_url`.

    Raises:
        TransportError: no NATS server answers there.
    """
    varz, jsz = (answer(monitor_url, page, TIMEOUT_S) for page in ("varz", "jsz?consumers=true&config=true&raft=true"))
    status, _ = health(monitor_url)
    with readable(monitor_url):
        return _exposition(varz, jsz, status)


def _exposition(varz: dict[str, Any], jsz: dict[str, Any], status: str) -> str:
    """The figures of the server that gave these answers."""
    name = varz["server_name"]
    lines = [_line(f"nats_varz_{key}", value, {"server_id": name}) for key, value in _numbers(varz)]
    lines.append(_line("nats_healthz_status_value", float(status == "ok"), {"server_id": name, "value": status}))
    lines += _jetstream(jsz, name)
    return "\n".join(lines) + "\n"


def _jetstream(jsz: dict[str, Any], server: str) -> Iterator[str]:
    """JetStream's figures, with the names and labels of NATS' exporter, so that one set of rules
    fits both. A server without a cluster is the leader of everything on it.
    """
    meta = jsz.get("meta_cluster")
    leads = "true" if meta is None or meta.get("leader") == server else "false"
    labels = {"server_id": server, "server_name": server, "is_meta_leader": leads}
    for key, field in _SERVER.items():
        yield _line(f"nats_server_{key}", jsz.get(field, 0), labels)
    yield _line("nats_server_max_storage", jsz["config"]["max_storage"], labels)
    for account in jsz.get("account_details", []):
        for stream in account.get("stream_detail") or []:
            own = {**labels, "account": account["name"], "stream_name": stream["name"], "is_stream_leader": _leads(stream, server)}
            for key, field in _STREAM.items():
                yield _line(f"nats_stream_{key}", stream["state"].get(field, 0), own)
            yield _line("nats_stream_limit_bytes", stream["config"]["max_bytes"], own)
            yield _line("nats_stream_limit_messages", stream["config"]["max_msgs"], own)
            for consumer in stream.get("consumer_detail") or []:
                of = {**own, "consumer_name": consumer["name"], "is_consumer_leader": _leads(consumer, server)}
                for field in _CONSUMER:
                    yield _line(f"nats_consumer_{field}", consumer[field], of)


def _leads(asset: dict[str, Any], server: str) -> str:
    cluster = asset.get("cluster")
    return "true" if cluster is None or cluster.get("leader") == server else "false"


def _numbers(answer: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in answer.items():
        if not _NAME.fullmatch(key):
            continue  # no server names a figure so, and it would be read as other figures
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}_")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}".replace("/", "_"), value
        elif key in {"start", "config_load_time"}:
            yield f"{prefix}{key}", datetime.fromisoformat(value[:26].rstrip("Z") + "+00:00").timestamp()


def _line(name: str, value: float, labels: dict[str, str]) -> str:
    return f"{name}{{{', '.join(f'{key}={json.dumps(text)}' for key, text in labels.items())}}} {value}"


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

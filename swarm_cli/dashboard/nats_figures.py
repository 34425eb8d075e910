"""Exports a NATS server's figures to Prometheus, for one machine. In a cluster
prometheus-nats-exporter, a Go program beside each server, does this.

It reads a server's monitoring port and uses the exporter's names (`collector.go`, `jsz.go` and
`healthz.go` in `collector/`, June 2026), with
`-varz -jsz=all -healthz -prefix=nats -use_internal_server_name`.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.plain_files import read_plain
from swarm_cli.loopback import LOOPBACK
from swarm_cli.nats.server_certificates import not_after

_STREAM = {"total_messages": "messages", "total_bytes": "bytes", "first_seq": "first_seq", "last_seq": "last_seq"}
_STREAM |= {"consumer_count": "consumer_count", "subject_count": "num_subjects"}
_CONSUMER = ("num_ack_pending", "num_redelivered", "num_waiting", "num_pending")
_SERVER = {"total_streams": "streams", "total_consumers": "consumers", "total_messages": "messages", "total_message_bytes": "bytes"}


_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TIMEOUT_S = 1.5
"""Less than the time between two scrapes."""
_NOTES_BYTES = 65_536
_NAME = re.compile("[A-Za-z0-9_/]+")


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


def figures(monitor_url: str) -> str:
    """The text that Prometheus scrapes. Never raises: a server that does not answer is reported the
    way the exporter does, so that its alert fires.
    """
    try:
        return exposition(monitor_url)
    except (OSError, ValueError, KeyError, TypeError):
        return _line("nats_healthz_status_value", 0.0, {"server_id": "", "value": "unreachable"}) + "\n"


def exposition(monitor_url: str) -> str:
    """The figures of the server whose monitoring port is at `monitor_url`.

    Raises:
        OSError, ValueError, KeyError, TypeError: no NATS server answers there.
    """
    varz, jsz = _get(f"{monitor_url}/varz"), _get(f"{monitor_url}/jsz?consumers=true&config=true&raft=true")
    name = varz["server_name"]
    lines = [_line(f"nats_varz_{key}", value, {"server_id": name}) for key, value in _numbers(varz)]
    if (ends := not_after(varz)) is not None:  # the exporter leaves it out; in a cluster `swarm nats watch` has it
        lines.append(_line("swarm_nats_certificate_expiry_timestamp_seconds", ends, {"server": name}))
    status = _get(f"{monitor_url}/healthz")["status"]
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


def _get(url: str) -> dict[str, Any]:
    try:
        with _NO_PROXY.open(url, timeout=TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:  # /healthz answers 503 with the same body if the server is not healthy
        found = json.load(error)
    return found

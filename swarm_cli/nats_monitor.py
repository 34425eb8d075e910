"""Asks the NATS server of a run of this machine how it is, at its monitoring port."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.plain_files import read_plain
from swarm_cli.loopback import LOOPBACK

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TIMEOUT_S = 1.5
"""Less than the time between two scrapes."""
_NOTES_BYTES = 65_536


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
    """What the server says of itself: `ok` or another status, and why it is not well.

    Raises:
        OSError, ValueError, KeyError, TypeError: no NATS server answers there.
    """
    said = answer(f"{monitor_url}/healthz")
    return str(said["status"]), str(said.get("error", ""))


def answer(url: str) -> dict[str, Any]:
    """The JSON object at a path of a monitoring port. Raises as `health`."""
    try:
        with _NO_PROXY.open(url, timeout=TIMEOUT_S) as told:
            found: dict[str, Any] = json.load(told)
    except urllib.error.HTTPError as error:  # /healthz answers 503 with the same body if the server is not healthy
        found = json.load(error)
    return found

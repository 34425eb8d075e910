"""Finds out why a NATS server is in trouble, from its greeting and its monitoring port: it hangs,
or its disk is or was full, and it stores nothing until it is restarted. All processes fall silent
at once then, and restarting those helps nobody.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.plain_files import read_plain
from shared.text import error_text, visible
from shared.transport.base import NotConnected, TransportError
from shared.transport.nats.answers import answer_object, quote_server, readable
from swarm_cli.chosen_config import LOOPBACK
from swarm_cli.installation import shown
from swarm_cli.runs import SERVER_LOG, restart_options, run_on_server, running_since, starts_again

STARTS_S = 20.0
"""The server of a run that was started more recently may not be up yet."""
FEW_BYTES, FEW = 64 * 2**20, 0.1
"""A disk with less than both left, bytes and part of it, is nearly full."""


def cannot_store(var_dir: Path, node_url: str) -> str:
    """Why the server at `node_url` stores nothing, in its words, and what mends that; empty if it
    stores, or is not that of exactly one run running on this machine. Waits two seconds at most.
    """
    folder = run_on_server(var_dir, node_url)
    if folder is None or time.time() - (running_since(folder) or 0.0) < STARTS_S:
        return ""
    monitor = monitor_of(node_url, folder.parent.parent)
    try:
        status, why = health(monitor) if monitor else ("ok", "")
    except TransportError:
        return ""
    if status == "ok":
        return ""
    said = visible(why or status, 400)
    return f"the NATS server of run {visible(folder.name, 80)} answers but cannot store ({said}): {_repair_advice(folder)}"


def silent_together(var_dir: Path, node_url: str) -> str:
    """Explain that every process fell silent at once and the server tells no cause: it is what they
    share. Empty if it is not that of exactly one run running on this machine.
    """
    folder = run_on_server(var_dir, node_url)
    if folder is None:
        return ""
    told = "every process fell silent at once, so the cause is most likely the NATS server"
    return f"{told} of run {visible(folder.name, 80)}, to which they write: {_repair_advice(folder)}"


def _repair_advice(folder: Path) -> str:
    """The remedy for a server that stores nothing: space, if there is little, and a restart."""
    again = starts_again("nats", restart_options(folder))
    log = visible(str(shown(folder / SERVER_LOG)), 400)
    return f"{_space(folder)}{again}, and it stores nothing until then; its log is {log}"


def _space(folder: Path) -> str:
    """Free space on the folder's disk, and a hint to free more if it is low."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return ""
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    where, told = visible(str(shown(folder)), 400), f"has {free / 2**20:,.0f} of {size / 2**20:,.0f} MiB free"
    nearly_full = free < FEW_BYTES and free < FEW * size
    return f"the disk of {where} {told}: free space on it, then " if nearly_full else f"its disk {told}; "


GREETING_S = 2.0


class ServerSilent(NotConnected):
    """The server of a run that is running here does not answer. The message is complete: what ran
    here before or runs elsewhere has nothing to do with it.
    """


@contextmanager
def naming_silent_server(var_dir: Path, node_url: str) -> Iterator[None]:
    """Raises ServerSilent for a NotConnected of the block, if `silent_server` explains it."""
    try:
        yield
    except ServerSilent:
        raise
    except NotConnected as error:
        if told := silent_server(var_dir, node_url):
            raise ServerSilent(told) from error
        raise


def silent_server(var_dir: Path, node_url: str) -> str:
    """Which run's server at `node_url` does not answer or cannot store, how it is started again,
    and where its log is; empty if it is well, or is not that of exactly one run running on this
    machine. Waits `GREETING_S` for it, so call it where another attempt has failed.
    """
    folder = run_on_server(var_dir, node_url)
    if folder is None:
        return ""
    if _greets(node_url):
        return cannot_store(var_dir, node_url)
    run, log = visible(folder.name, 80), visible(str(shown(folder / SERVER_LOG)), 400)
    age_s = max(0.0, time.time() - (running_since(folder) or 0.0))
    if age_s < STARTS_S:
        return f"run {run} was started {age_s:.0f} s ago and its NATS server does not answer yet: try again; its log is {log}"
    return f"the NATS server of run {run} does not answer: {starts_again('nats', restart_options(folder))}; its log is {log}"


def _greets(node_url: str) -> bool:
    """Check whether a NATS server says something at the address: it greets whoever connects. One
    that hangs does not, although the system takes the connection.
    """
    try:
        at = urlsplit(node_url)
        with socket.create_connection((at.hostname or "", at.port or 4222), GREETING_S) as line:
            return bool(line.recv(1))
    except (OSError, ValueError):
        return False


# The monitoring port.

TIMEOUT_S = 1.5
"""Less than the time between two scrapes."""
_MOST_BYTES = 16 * 2**20
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
    """Check whether the process whose id is in the note's name was started with the note's folder
    as an argument. Raises OSError if there is no such process.
    """
    process = Path("/proc", str(int(note.stem.removeprefix("nats-server_"))))
    words = (process / "cmdline").read_bytes().split(b"\0")
    folder, at = note.parent.resolve(), (process / "cwd").resolve(strict=True)
    return any((at / os.fsdecode(word)).resolve() == folder for word in words if word)


def _is_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname in LOOPBACK


def health(monitor_url: str) -> tuple[str, str]:
    """The server's own status, `ok` or another, and why it is not well. Raises as `answer`."""
    told = answer(monitor_url, "healthz", TIMEOUT_S)
    with readable("healthz"):
        return str(told["status"]), str(told.get("error", ""))


def answer(monitor_url: str, page: str, timeout_s: float) -> dict[str, Any]:
    """The JSON object that is a page of a monitoring port, whatever its status: that of /healthz is
    503, with the same body, if the server is not healthy. Raises TransportError if it is none.
    """
    at = urlsplit(monitor_url)
    line = http.client.HTTPConnection(at.hostname or "", at.port, timeout=timeout_s)  # directly: a proxy is elsewhere
    try:
        with closing(line):
            line.request("GET", f"/{page}")
            text = line.getresponse().read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise TransportError(quote_server(error_text(error))) from None
    return answer_object(text, page)

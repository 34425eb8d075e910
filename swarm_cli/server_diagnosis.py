"""What is said of a NATS server that answers but stores nothing: its disk is full, or was. It does
not store again before it is restarted, so all processes fall silent at once, and to start those
again helps nobody.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from shared.text import visible
from shared.transport.base import NotConnected, TransportError
from swarm_cli.installation import shown
from swarm_cli.nats_monitor import health, monitor_of
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
    return f"the NATS server of run {visible(folder.name, 80)} answers but cannot store ({said}): {_mended(folder)}"


def silent_together(var_dir: Path, node_url: str) -> str:
    """What is said where every process fell silent at once and the server tells no cause: it is
    what they share. Empty if it is not that of exactly one run running on this machine.
    """
    folder = run_on_server(var_dir, node_url)
    if folder is None:
        return ""
    told = "every process fell silent at once, so the cause is most likely the NATS server"
    return f"{told} of run {visible(folder.name, 80)}, to which they write: {_mended(folder)}"


def _mended(folder: Path) -> str:
    """How the server of the run in `folder` stores again: space, if there is little, and a
    restart.
    """
    again = starts_again("nats", restart_options(folder))
    log = visible(str(shown(folder / SERVER_LOG)), 400)
    return f"{_space(folder)}{again}, and it stores nothing until then; its log is {log}"


def _space(folder: Path) -> str:
    """How much space the folder's file system has, and that it is to be given some if that is
    little.
    """
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
    """Whether a NATS server says something at the address: it greets whoever connects. One that
    hangs does not, although the system takes the connection.
    """
    try:
        at = urlsplit(node_url)
        with socket.create_connection((at.hostname or "", at.port or 4222), GREETING_S) as line:
            return bool(line.recv(1))
    except (OSError, ValueError):
        return False

"""What is said of a NATS server that does not answer although a run of this machine is running on
it: the run's processes all wait for it, and no older run explains it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from shared.text import visible
from shared.transport.base import NotConnected
from swarm_cli.cannot_store import STARTS_S, cannot_store
from swarm_cli.elsewhere import SERVER_LOG, run_on_server
from swarm_cli.restart_command import restart_options, starts_again
from swarm_cli.running import running_since
from swarm_cli.shipped import shown

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

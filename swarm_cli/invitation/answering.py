"""Tries whether anybody listens at the addresses that a token names. Nothing is sent there."""

from __future__ import annotations

import socket
import threading
import time
from urllib.parse import urlsplit

from shared.os_words import in_words
from shared.text import visible

_PORT = 4222


def silent(urls: str, within_s: float) -> list[str]:
    """A phrase for each server in `urls`, separated by commas, that takes no connection, such as
    `nats://hub:4222 (Name or service not known)`. Takes `within_s` at most.
    """
    servers = [url.strip() for url in urls.split(",")]
    why: dict[str, str] = {}
    # Resolving a name has no time limit; a thread that still waits for it ends with the process.
    tries = [threading.Thread(target=_try, args=(server, within_s, why), daemon=True) for server in servers]
    for each in tries:
        each.start()
    give_up_at = time.monotonic() + within_s
    for each in tries:
        each.join(max(0.0, give_up_at - time.monotonic()))
    told = ((server, why.get(server, f"no answer within {within_s:g} s")) for server in servers)
    return [f"{visible(server)} ({reason})" for server, reason in told if reason]


def _try(server: str, within_s: float, why: dict[str, str]) -> None:
    at = urlsplit(server)
    try:
        socket.create_connection((at.hostname or "", at.port or _PORT), within_s).close()
    except OSError as error:
        why[server] = in_words(error)
    else:
        why[server] = ""

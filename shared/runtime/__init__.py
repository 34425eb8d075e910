"""Turns a program into a service: start-up, logs, health, metrics, status, orderly shutdown
(`main`), and restart (`supervise`).

What a service does is in its own folder under `services/`. The names below are imported on first
use, so that a command that needs only the exit codes or the logs loads no NATS client.
"""

from typing import TYPE_CHECKING

from shared.importing import on_first_use

if TYPE_CHECKING:
    from shared.runtime.exits import EXIT_CONFIG, FatalError
    from shared.runtime.service import Service, ServiceContext, main

__all__ = [
    "EXIT_CONFIG",
    "FatalError",
    "Service",
    "ServiceContext",
    "main",
]

_HOMES = {
    **dict.fromkeys(("EXIT_CONFIG", "FatalError"), "exits"),
    **dict.fromkeys(("Service", "ServiceContext", "main"), "service"),
}


__getattr__ = on_first_use(__name__, _HOMES)

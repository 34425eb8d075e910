"""What turns a program into a service: start-up, logs, health, metrics, status, orderly shutdown
(`main`), and restart (`supervise`).

What a service does is in its own folder under `services/`.
"""

from shared.runtime.errors import EXIT_CONFIG, FatalError
from shared.runtime.service import Service, ServiceContext, main
from shared.runtime.tasks import run_until_stopped, sleep_unless_stopped

__all__ = ["EXIT_CONFIG", "FatalError", "Service", "ServiceContext", "main", "run_until_stopped", "sleep_unless_stopped"]

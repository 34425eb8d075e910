"""Run process lines through honcho's Manager, as `honcho start` would, and say in the end how it
ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import honcho.manager
from honcho.manager import SYSTEM_PRINTER_NAME, Manager
from honcho.printer import Printer

STOPPED_BY_SIGNAL = (130, 143)
"""honcho's codes for SIGINT and SIGTERM."""
PATIENCE_S = 20
"""After which a process that was asked to end is killed. honcho has 5, too few for NATS or a
checkpoint on a busy machine.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended: the code of the process that ended first, and that process's name."""

    code: int
    first: str | None


class NotingPrinter(Printer):  # type: ignore[misc]
    """honcho's printer, which also notes which process was the first to stop."""

    first_stopped: str | None = None

    def write(self, message: Any) -> None:
        """Print a line; only in its own lines does honcho tell of ended processes."""
        if message.name == SYSTEM_PRINTER_NAME and " stopped (rc=" in message.data and self.first_stopped is None:
            self.first_stopped = message.data.split(" ", 1)[0]
        super().write(message)


def run_lines(lines: Mapping[str, str], environment: Mapping[str, str]) -> Outcome:
    """Start every line, pass their output on, and when one ends stop the others. Returns when all
    have ended.
    """
    printer = NotingPrinter(sys.stdout)
    honcho.manager.KILL_WAIT = PATIENCE_S
    manager = Manager(printer)
    for name, command in lines.items():
        manager.add_process(name, command, env=_with_own_python_first(environment))
    manager.loop()
    return Outcome(_as_exit_code(manager.returncode), printer.first_stopped)


def _with_own_python_first(environment: Mapping[str, str]) -> dict[str, str]:
    """The lines say `python` and `nats-server`; they mean those of the environment that `swarm` is
    installed in.
    """
    own = str(Path(sys.executable).parent)
    path = environment.get("PATH", os.defpath)
    return {**environment, "PATH": f"{own}{os.pathsep}{path}", "PYTHONUNBUFFERED": "1"}


def _as_exit_code(code: int | None) -> int:
    if code is None:
        return 1
    return code if code >= 0 else 128 - code

"""Runs process lines for `swarm up` and for experiments, and returns how the run ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.config import NodeConfig
from swarm_cli.installation import own_modules
from swarm_cli.local.output import Output
from swarm_cli.local.process import RUN_VARIABLE
from swarm_cli.local.supervisor import Beside, Outcome, run_supervised
from swarm_cli.runs import STOPPED_BY_SIGNAL

GRACE_S = 180.0
"""Seconds that a process may take to end before it is killed: longer than writing a checkpoint of a
policy with a few billion parameters.
"""

__all__ = ["GRACE_S", "STOPPED_BY_SIGNAL", "Outcome", "lines_for_people", "run_lines"]


def run_lines(
    lines: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    ends_by_steps: bool = True,
    grace_s: float = GRACE_S,
    log_file: Path | None = None,
    beside: Beside | None = None,
) -> Outcome:
    """Start every line as a process, pass on the output, and apply `swarm_cli.local.rules` when one
    ends. Returns when the run is over and all processes have ended.

    ends_by_steps: the run has a number of steps, and ends when it is complete or can no longer be
        completed.
    grace_s: seconds that a process may take to end.
    log_file: receives the output too; each process's deaths are noted in its folder.
    beside: a context that is open during the run.
    """
    output = Output(log_file=log_file)
    try:
        return run_supervised(
            lines,
            _with_own_python_first(environment) | ({RUN_VARIABLE: str(log_file.parent.absolute())} if log_file else {}),
            ends_by_steps=ends_by_steps,
            output=output,
            grace_s=grace_s,
            beside=beside,
        )
    finally:
        output.close()


def lines_for_people(config: NodeConfig) -> dict[str, str]:
    """The environment variable with which processes write lines as on a terminal, unless the
    configuration asks for JSON: they write to a pipe, but people read what `Output` makes of it.
    """
    return {"SWARM_LOG__FORMAT": "console"} if config.log.format == "auto" else {}


def _with_own_python_first(environment: Mapping[str, str]) -> dict[str, str]:
    """Put the environment that `swarm` is installed in first on the PATH, because the lines name
    only `python` and `nats-server`.
    """
    own = str(Path(sys.executable).parent)
    path = environment.get("PATH", os.defpath)
    return {**environment, **own_modules(), "PATH": f"{own}{os.pathsep}{path}", "PYTHONUNBUFFERED": "1"}

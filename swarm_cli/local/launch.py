"""Run process lines as `swarm up` and experiments do, and say in the end how it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from swarm_cli.local.output import Output
from swarm_cli.local.supervisor import Beside, Outcome, run_supervised
from swarm_cli.own_modules import own_modules
from swarm_cli.run_end import STOPPED_BY_SIGNAL

GRACE_S = 180.0
"""Seconds that a process has to end before it is killed: longer than a checkpoint of a policy with
a few billion parameters takes to write.
"""

__all__ = ["GRACE_S", "STOPPED_BY_SIGNAL", "Outcome", "run_lines"]


def run_lines(
    lines: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    ends_by_steps: bool = True,
    grace_s: float = GRACE_S,
    log_file: Path | None = None,
    beside: Beside | None = None,
) -> Outcome:
    """Start every line, pass their output on, and do what `swarm_cli.local.rules` says when one
    ends. Returns when the run is over and all have ended.

    ends_by_steps: the run has a number of steps, and ends when it is complete or cannot be any
        more.
    grace_s: seconds that a process has to end.
    log_file: gets their output too.
    beside: what is open while the run lasts.
    """
    output = Output(log_file=log_file)
    try:
        return run_supervised(
            lines,
            _with_own_python_first(environment),
            ends_by_steps=ends_by_steps,
            output=output,
            grace_s=grace_s,
            beside=beside,
        )
    finally:
        output.close()


def _with_own_python_first(environment: Mapping[str, str]) -> dict[str, str]:
    """The lines say `python` and `nats-server`; they mean those of the environment that `swarm` is
    installed in.
    """
    own = str(Path(sys.executable).parent)
    path = environment.get("PATH", os.defpath)
    return {**environment, **own_modules(), "PATH": f"{own}{os.pathsep}{path}", "PYTHONUNBUFFERED": "1"}

"""Derives a task from each source in a separate process, with a deadline and a memory limit. The
tasks and their settings come from a token, and some settings would take hours or all memory.

`python -m swarm_cli.join.tasks_apart` is that process: it reads the sources from standard input and
writes the problems to standard output.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

from shared.config import NodeConfig, TaskSpec
from swarm_cli.config_commands import task_problems
from swarm_cli.own_modules import own_modules

DEADLINE_S = 20.0
_READY = b"ready\n"


def problems_within(config: NodeConfig, deadline_s: float = DEADLINE_S) -> list[str]:
    """`task_problems`, or one problem if they took too long. The deadline starts once the process
    has imported what it needs.
    """
    names = ", ".join(dict.fromkeys(spec.dataset or spec.path for spec in config.tasks))
    remedy = (
        f"({names}; the settings of one may demand too much): name others with --tasks, or ask the operator for a token "
        "with smaller settings"
    )
    asked = {
        "tasks": [spec.model_dump(mode="json") for spec in config.tasks],
        "held_out": config.eval.tasks,
        "memory_bytes": config.verifier.worker_memory_mb * 2**20,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "swarm_cli.join.tasks_apart"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=os.environ | own_modules() | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != _READY:
                return ["the process that derives the tasks does not start: `swarm config check` says why"]
            told, _ = process.communicate(json.dumps(asked).encode(), timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return [f"deriving one task from each source took longer than {deadline_s:.0f} s {remedy}"]
        finally:
            process.kill()
    try:
        return [str(problem) for problem in json.loads(told)]
    except ValueError:
        return [f"the process that derived one task from each source ended with code {process.returncode} {remedy}"]


def main() -> None:
    """Write `ready`, read the sources, write their problems."""
    from shared.tasks.derive import dataset_names, preload_installed

    dataset_names()
    preload_installed()
    # A dataset that prints must not write into the answer.
    answer = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    answer.write(_READY)
    asked = json.load(sys.stdin.buffer)
    tasks = [TaskSpec.model_validate(spec) for spec in asked["tasks"]]
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer.write(json.dumps(task_problems(tasks, asked["held_out"])).encode())


if __name__ == "__main__":
    main()

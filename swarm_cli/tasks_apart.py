"""Derives a task from each source in a separate process, with a deadline and a memory limit. The
tasks and their settings may come from somebody else (a token, a configuration, an overlay), and
some settings would take hours or all memory.

`python -m swarm_cli.tasks_apart` is that process: it reads the sources from standard input and
writes the problems to standard output.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared.runtime.parent_death import ending_with_parent
from swarm_cli.own_modules import own_modules

if TYPE_CHECKING:
    from shared.config import TaskSpec

DEADLINE_S = 60.0
"""All of reasoning-gym's datasets with their default settings take a tenth of it."""
FILE_S, FILE_S_PER_MIB = 120.0, 1.0
"""More for each file, whose rows are read and of which some are shown to the verifier."""
MEMORY_BYTES = 2**30
"""What deriving may take beyond the modules. Usual settings take a few MiB."""
SMALLER = "try each dataset alone, and make the sizes in its `config` smaller; if this machine was busy, try again"
"""A remedy for whoever can change the settings."""
_READY = b"ready\n"


def problems_within(
    tasks: Sequence[TaskSpec], held_out: int, remedy: str, places: Sequence[int] = (), deadline_s: float | None = None
) -> list[str]:
    """`source_problems`, or one line if finding them took too long or too much memory.

    `held_out`, `places`: as in `source_problems`; `remedy`: what to do if the settings of a source
    demand too much. The deadline starts once the process has imported what it needs; by default it
    depends on the files to read.
    """
    return begin_deriving(tasks, held_out, remedy, places, deadline_s)()


def begin_deriving(
    tasks: Sequence[TaskSpec], held_out: int, remedy: str, places: Sequence[int] = (), deadline_s: float | None = None
) -> Callable[[], list[str]]:
    """Start the process of `problems_within`, which imports what it needs meanwhile. The returned
    function hands it the sources and waits for their problems.
    """
    names = ", ".join(dict.fromkeys(spec.dataset or spec.path for spec in tasks))
    why = f"({names}; the settings of one may demand too much): {remedy}"
    asked = {"tasks": [spec.model_dump(mode="json") for spec in tasks], "held_out": held_out, "places": list(places)}
    if deadline_s is None:
        deadline_s = DEADLINE_S + sum(_file_s(spec) for spec in tasks)
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm_cli.tasks_apart"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=os.environ | own_modules() | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=ending_with_parent(),
    )

    def problems() -> list[str]:
        with process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != _READY:
                    return ["the process that derives the tasks does not start: `python -m swarm_cli.tasks_apart` says why"]
                told, _ = process.communicate(json.dumps(asked).encode(), timeout=deadline_s)
            except subprocess.TimeoutExpired:
                return [f"deriving one task from each source took longer than {deadline_s:.0f} s {why}"]
            finally:
                process.kill()
        try:
            return [str(problem) for problem in json.loads(told)]
        except ValueError:
            return [f"the process that derived one task from each source ended with code {process.returncode} {why}"]

    return problems


def _file_s(spec: TaskSpec) -> float:
    """Seconds that a source's files may take; 0 if it has none, or none that can be read."""
    if spec.source != "file":
        return 0.0
    from shared.tasks.file_formats import FileSourceError, data_files
    from shared.tasks.file_source import MAX_BYTES

    try:
        size_bytes = sum(file.stat().st_size for file in data_files(Path(spec.path)))
    except (FileSourceError, OSError):
        return 0.0
    return FILE_S + min(size_bytes, MAX_BYTES) / 2**20 * FILE_S_PER_MIB


def main() -> None:
    """Write `ready`, read the sources, write their problems."""
    gc.disable()  # imports make many objects and hardly any garbage
    from shared.config import TaskSpec
    from shared.tasks.derive import dataset_names, preload_installed
    from shared.tasks.sandbox.limits import MappedMemory, limit_data
    from shared.tasks.specs import source_problems

    dataset_names()
    preload_installed()
    gc.freeze()
    gc.enable()
    # A dataset that prints must not write into the answer.
    answer = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    answer.write(_READY)
    asked = json.load(sys.stdin.buffer)
    tasks = [TaskSpec.model_validate(spec) for spec in asked["tasks"]]
    # Rows of files are mapped, and do not count.
    limit_data((MappedMemory().data_bytes() or 0) + MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer.write(json.dumps(source_problems(tasks, asked["held_out"], asked["places"])).encode())


if __name__ == "__main__":
    main()

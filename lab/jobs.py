"""Makes runs, one after another or in several parallel processes. Each process uses one thread,
which is fastest for small models.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from lab.arms import plan_run
from lab.runs import RunFolder, code_commit, resolved_settings
from lab.spec import Spec

if TYPE_CHECKING:
    from lab.simulate import Simulation
    from lab.task_desk import Shared

Report = Callable[[str], None]
_HEARTBEAT_S = 60.0
_shared: Shared | None = None
"""Derived tasks and scores shared by all runs of this process, because arms of one seed draw the
same tasks.
"""


def make_runs(spec: Spec, folders: Sequence[RunFolder], jobs: int, report: Report, threads: int = 1) -> None:
    """Make every run; `report` gets a sentence now and then. With several jobs, each process goes
    through all runs and leaves out those that another one has claimed.

    Raises what a run raises, after the other processes have ended.
    """
    for folder in folders:
        plan_run(spec, folder.arm, folder.seed)  # so that a mistake in the last arm is found now and not after hours
    if jobs == 1:
        _make_each(spec, folders, report, threads)
        return
    # Each process is forked from one that has imported what a run needs, which takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.simulate", "lab.records", "lab.task_desk"])
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context, initializer=_end_with_command) as pool:
        for ended in [pool.submit(_make_each, spec, folders, report, threads) for _ in range(jobs)]:
            ended.result()


def _make_each(spec: Spec, folders: Sequence[RunFolder], report: Report, threads: int) -> None:
    """Make the runs that no other process makes or has made."""
    for number, folder in enumerate(folders, start=1):
        seconds = make_run(spec, folder, threads, report)
        if seconds is not None:
            report(f"[{number}/{len(folders)}] {_name(folder)} took {seconds:.0f} s")


def make_run(
    spec: Spec, folder: RunFolder, threads: int = 1, report: Report | None = None, kind: type[Simulation] | None = None
) -> float | None:
    """Make one run in this process and return its seconds; None if another process makes it or has
    made it in the meantime. `kind`: a study's own simulation.
    """
    with folder.claimed() as mine:
        if not mine or folder.done:
            return None
        return _make(spec, folder, threads, report, kind)


def _end_with_command() -> None:
    # For a process of the pool. The kernel's signal at a parent's death would not do, because its
    # parent is the fork server, which lives as long as any process of the pool.
    command = multiprocessing.parent_process()
    assert command is not None

    def wait() -> None:
        command.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _make(spec: Spec, folder: RunFolder, threads: int, report: Report | None, kind: type[Simulation] | None) -> float:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    from lab.records import RecordWriter
    from lab.simulate import Simulation
    from lab.task_desk import Shared

    torch.set_num_threads(threads)
    started = time.monotonic()
    code_commit()  # read now, because files may change before the run ends
    global _shared
    _shared = _shared or Shared()
    simulation = (kind or Simulation)(plan_run(spec, folder.arm, folder.seed), _shared)
    rounds = simulation.run_plan.rounds
    writer = RecordWriter(folder.records)
    told = started

    def progress(number: int) -> None:
        nonlocal told
        if report is not None and time.monotonic() - told > _HEARTBEAT_S:
            told = time.monotonic()
            report(f"  {_name(folder)}: round {number} of {rounds} after {told - started:.0f} s")

    try:
        # reasoning-gym's bf compiler prints a dot for every program.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            simulation.run(writer, progress)
    finally:
        writer.close()
    seconds = time.monotonic() - started
    folder.finish(rounds, seconds, spec.digest(folder.arm), resolved_settings(spec, folder.arm))
    return seconds


def _name(folder: RunFolder) -> str:
    return f"{folder.arm} seed {folder.seed}"

"""Weights & Biases. Extra `wandb`.

Without `tracking.online` it writes a run file in the run's folder, which `wandb sync` sends when
somebody wants it to, and needs no account. Online, its own variables hold (WANDB_API_KEY,
WANDB_ENTITY, WANDB_BASE_URL).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from services.trainer.tracking.base import TrackedRun

_STEP = "step"


class WandbWriter:
    """The step is a number like the others and the axis of all of them: W&B's own step never goes
    back, as a trainer's does that repeats steps after a crash.
    """

    def __init__(self, run: TrackedRun) -> None:
        # W&B reports its own errors and its use to its makers; read when it is imported.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run = wandb.init(
            mode="online" if run.online else "offline",
            project=run.project,
            name=run.name,
            id=run.id,
            # Offline nothing is there to go on with, and W&B says so as a warning.
            resume="allow" if run.online else None,
            dir=str(run.run_dir),
            config=dict(run.settings),
            # Numbers only: no terminal output, source, packages or readings of the machine.
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_machine_info=True,
                disable_git=True,
                save_code=False,
                disable_code=True,
            ),
        )
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """One row of the run's history."""
        self._run.log({_STEP: step, **numbers})

    def close(self) -> None:
        """Write the end of the run file, or send the rest."""
        self._run.finish()


def open_tracker(run: TrackedRun) -> WandbWriter:
    """The entry `wandb`."""
    return WandbWriter(run)

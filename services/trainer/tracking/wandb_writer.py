"""Weights & Biases. Extra `wandb`.

Without `tracking.online` it writes a run file into the run's folder, which `wandb sync` uploads
later, and needs no account. Online, its own variables apply (WANDB_API_KEY, WANDB_ENTITY,
WANDB_BASE_URL).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from services.trainer.tracking.base import TrackedRun

_STEP = "step"


class WandbWriter:
    """The step is logged as a number and used as the axis of all others, because W&B's own step
    never decreases, while a trainer's does when it repeats steps after a crash.
    """

    def __init__(self, run: TrackedRun) -> None:
        # Turn off W&B's reports of errors and usage to its makers; read when it is imported.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run = wandb.init(
            mode="online" if run.online else "offline",
            project=run.project,
            name=run.name,
            id=run.id,
            # Offline there is no run to resume, and W&B would print a warning.
            resume="allow" if run.online else None,
            dir=str(run.run_dir),
            config=dict(run.settings),
            # Only numbers: no terminal output, source code, packages or system metrics.
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
        """Write the end of the run file, or upload the rest."""
        self._run.finish()


def open_tracker(run: TrackedRun) -> WandbWriter:
    """The entry point `wandb`."""
    return WandbWriter(run)

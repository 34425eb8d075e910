"""Built-in trackers: TensorBoard, Trackio, Weights & Biases, each with the extra of its name."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

from services.trainer.tracking.base import TrackedRun

EVENTS_FOLDER = "tensorboard"


class TensorboardWriter:
    """Scalars through torch's writer. TensorBoard hides earlier values of steps that are trained
    again.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(log_dir=str(run.run_dir / EVENTS_FOLDER), purge_step=run.step + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


def open_tensorboard(run: TrackedRun) -> TensorboardWriter:
    """The entry point `tensorboard`."""
    return TensorboardWriter(run)


# `TRACKIO_DIR=var/trackio trackio show` opens Trackio's page. With `tracking.online` its own
# variables say where numbers go too: TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.

FOLDER = "trackio"
_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioWriter:
    """Trackio writes in a thread of its own and prints to standard output, which is the service's
    log.
    """

    def __init__(self, run: TrackedRun) -> None:
        # Trackio reads this when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str((run.shared_dir / FOLDER).absolute()))
        if not run.online:
            for variable in _ELSEWHERE:
                os.environ.pop(variable, None)
        import trackio

        with contextlib.redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=run.project,
                name=run.name,
                resume="allow",
                config=dict(run.settings),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """One row. A step that is trained again has two."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def open_trackio(run: TrackedRun) -> TrackioWriter:
    """The entry point `trackio`."""
    return TrackioWriter(run)


# Without `tracking.online` W&B writes a run file into the run's folder, which `wandb sync` uploads
# later, and needs no account. Online, its own variables apply (WANDB_API_KEY, WANDB_ENTITY,
# WANDB_BASE_URL).

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
        self._run.log({_STEP: step, **numbers})

    def close(self) -> None:
        self._run.finish()


def open_wandb(run: TrackedRun) -> WandbWriter:
    """The entry point `wandb`."""
    return WandbWriter(run)

"""TensorBoard: event files in the run's folder. Extra `tensorboard`."""

from __future__ import annotations

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
        """One scalar each."""
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file."""
        self._events.close()


def open_tracker(run: TrackedRun) -> TensorboardWriter:
    """The entry point `tensorboard`."""
    return TensorboardWriter(run)

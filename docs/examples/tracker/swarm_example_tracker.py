"""Writes chosen numbers of each step to a CSV file in the run's folder, for a spreadsheet.

[tracking]
trackers = ["csv"]
options = {columns = "train/reward_local train/loss"}
"""

from __future__ import annotations

from collections.abc import Mapping

from services.trainer.tracking.base import TrackedRun


class CsvTracker:
    """Writes `steps.csv` of one run; a run that goes on keeps the rows up to its step."""

    def __init__(self, run: TrackedRun) -> None:
        self._columns = str(run.options.get("columns", "train/reward_local")).split()
        file = run.run_dir / "steps.csv"
        rows = file.read_text().splitlines()[1:] if file.exists() else []
        # A trainer that is restarted repeats the steps after its checkpoint.
        kept = [row for row in rows if int(row.split(",")[0]) <= run.step]
        file.write_text("\n".join([",".join(["step", *self._columns]), *kept, ""]))
        self._file = file.open("a")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        row = [str(step), *(f"{numbers[name]:g}" if name in numbers else "" for name in self._columns)]
        self._file.write(",".join(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def open_tracker(run: TrackedRun) -> CsvTracker:
    """The tracker of a run that begins or goes on."""
    return CsvTracker(run)

"""Trackio: one local SQLite file per project, in `node.var_dir`/trackio. Extra `trackio`.

`TRACKIO_DIR=var/trackio trackio show` opens its page. With `tracking.online` its own variables say
where numbers go too: TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

from services.trainer.tracking.base import TrackedRun

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
        """Write the rest."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def open_tracker(run: TrackedRun) -> TrackioWriter:
    """The entry point `trackio`."""
    return TrackioWriter(run)

"""The interface of an experiment tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run of a tracker, as passed to an entry of `swarm.trackers`.

    name: for people, such as `dev-alpha`. id: the same after every restart, and different from
    every other run's. step: the last step that will not be trained again; steps after it in the
    tracker are from before a restart. project: `tracking.project`. online: whether the tracker may
    contact a server. run_dir: the node's folder of this run. shared_dir: `node.var_dir`, for what
    all runs share. settings: the settings that determine learning, as plain JSON values. options:
    `tracking.options`.
    """

    name: str
    id: str
    step: int
    project: str
    online: bool
    run_dir: Path
    shared_dir: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, float | int | bool | str] = field(default_factory=dict)


class Tracker(Protocol):
    """A destination of numbers. All calls come from one thread and may block or fail, because the
    trainer does not wait for them.
    """

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """The numbers of one step, all finite, under names such as `train/loss`."""

    def close(self) -> None:
        """Write everything that is not written yet."""

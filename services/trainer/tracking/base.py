"""What an experiment tracker is: the small interface that every writer has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run whose numbers a tracker gets, as an entry of `swarm.trackers` is given it.

    name: for people, such as `dev-alpha`. id: the same after every restart, and no other run's.
    step: the last step that is not trained again; what a tracker has of later steps is from an
    earlier life of this trainer. project: `tracking.project`. online: whether the tracker may talk
    to a server. run_dir: the node's folder of this run. shared_dir: `node.var_dir`, for what all
    runs have together. settings: how the run learns, as plain JSON values. options:
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
    """Where numbers go. All calls come from one thread, which may block, wait and fail: the trainer
    does not wait for it.
    """

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """The numbers of one step, all finite, under names such as `train/loss`."""

    def close(self) -> None:
        """Write what is not written yet."""

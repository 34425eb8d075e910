"""Opens the configured trackers."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import Any

from services.trainer.tracking.base import TrackedRun, Tracker
from services.trainer.tracking.extras import chosen_trackers
from services.trainer.tracking.feed import Feed, Feeds
from shared.config import NodeConfig
from shared.registry import TRACKERS
from shared.runtime.logs import Log

ID_FILE = "tracking_id"
_SHOWN = {"model", "sampler", "trainer", "eval"}
"""Sections that determine how a run learns. The others contain addresses, and names of files and
keys.
"""


def open_feeds(config: NodeConfig, step: int, log: Log) -> Feeds:
    """A feed for each tracker; does not wait until one is open. step: the last step trained."""
    names = chosen_trackers(config)
    if not names:
        return Feeds(())
    run = TrackedRun(
        name=f"{config.node.run}-{config.node.id}",
        id=_lasting_id(config.node.run_dir / ID_FILE),
        step=step,
        project=config.tracking.project,
        online=config.tracking.online,
        run_dir=config.node.run_dir,
        shared_dir=config.node.var_dir,
        settings=config.model_dump(mode="json", include=_SHOWN),
        options=config.tracking.options,
    )

    def warn(name: str, what: str) -> None:
        consequence = "training goes on, and metrics.jsonl has every step"
        log.warning("tracker_failed", tracker=name, reason=f"{name} {what}", consequence=consequence)

    return Feeds([Feed(name, partial(_opened, name, run), warn) for name in names])


def _opened(name: str, run: TrackedRun) -> Tracker:
    open_tracker: Any = TRACKERS.load(name)
    tracker: Tracker = open_tracker(run)
    return tracker


def _lasting_id(file: Path) -> str:
    """An id that stays the same over all restarts of the run. If it cannot be stored, a new one is
    used each time.
    """
    try:
        if known := file.read_text(encoding="ascii").strip():
            return known
    except (OSError, ValueError):
        pass
    fresh = uuid.uuid4().hex
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(fresh, encoding="ascii")
    except OSError:
        pass
    return fresh

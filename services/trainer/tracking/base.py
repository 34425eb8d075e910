"""The interface of an experiment tracker, and how the configured ones are opened and fed. None of
their packages is imported here.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shared.config import NodeConfig
from shared.registry import PACKAGE_FAILURES, TRACKERS, failure
from shared.runtime.logs import Log


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


_PACKAGE_OF = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""The package that a built-in tracker imports; the extra has the tracker's name."""


def chosen_trackers(config: NodeConfig) -> tuple[str, ...]:
    """The names in `tracking.trackers`; `auto` is TensorBoard if it is installed."""
    wanted = config.tracking.trackers
    if wanted == "auto":
        return ("tensorboard",) if is_installed("tensorboard") else ()
    return tuple(dict.fromkeys(wanted))


def tracking_problems(config: NodeConfig) -> list[str]:
    """A sentence with the remedy for each tracker that cannot be used here."""
    problems = [
        f"tracking.trackers: {name} needs the package {_PACKAGE_OF[name]}, which is not installed: pip install 'swarm-rl[{name}]'"
        for name in chosen_trackers(config)
        if name in _PACKAGE_OF and not is_installed(_PACKAGE_OF[name])
    ]
    if config.tracking.options and not set(chosen_trackers(config)) - set(TRACKERS.built_in):
        problems.append("tracking.options are for trackers from installed packages, and tracking.trackers names none")
    return problems


def is_installed(package: str) -> bool:
    """Return whether `package` can be imported. A folder of that name does not count: wandb writes
    one called `wandb` wherever it is used, and Python takes any folder for a package.
    """
    found = find_spec(package)
    return found is not None and found.origin is not None


# A tracker may be slow, hang or fail, and training does not wait for it. There is one thread per
# tracker, and a queue with room for `CAPACITY` steps; a tracker that is further behind misses
# steps. A problem is logged once, with the remedy, whatever it is and however often it occurs.

CAPACITY = 1024
"""Number of steps: a minute of a small model's, hours of a large one's."""
CLOSE_S = 5.0
"""How long an ending trainer waits, for all trackers together, until they have written the rest."""

Warn = Callable[[str, str], None]
"""Called with a tracker's name and a sentence that says what is wrong."""


class Feed:
    """The queue and thread of one tracker. `open_tracker` is called in the feed's own thread."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], warn: Warn, capacity: int = CAPACITY) -> None:
        self._name, self._open, self._tell = name, open_tracker, warn
        self._steps: queue.Queue[tuple[int, Mapping[str, float]]] = queue.Queue(capacity)
        self._ending = threading.Event()
        self._warned = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def offer(self, numbers: Mapping[str, float], step: int) -> None:
        """Returns at once; the numbers are lost if the tracker is too far behind."""
        if not self._thread.is_alive():
            return
        try:
            self._steps.put_nowait((step, numbers))
        except queue.Full:
            self._warn_once(f"is {self._steps.maxsize} steps behind, so that it misses some")

    def end(self) -> None:
        """Let the tracker write what it was given, and nothing more."""
        self._ending.set()

    def wait(self, until: float) -> None:
        """Wait until it has finished, at most until the monotonic time `until`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._warn_once("did not finish in time, so that its last steps may be missing")

    def _run(self) -> None:
        """The tracker's thread. Whatever the package does, training goes on."""
        try:
            tracker = self._open()
        except PACKAGE_FAILURES as error:
            self._warn_once(f"cannot be opened ({failure(error)})")
            return
        while not (self._ending.is_set() and self._steps.empty()):
            try:
                step, numbers = self._steps.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                tracker.log(numbers, step)
            except PACKAGE_FAILURES as error:
                self._warn_once(f"did not take step {step} ({failure(error)})")
        try:
            tracker.close()
        except PACKAGE_FAILURES as error:
            self._warn_once(f"did not close ({failure(error)})")

    def _warn_once(self, sentence: str) -> None:
        if not self._warned.is_set():
            self._warned.set()
            self._tell(self._name, sentence)


class Feeds:
    """The feeds of all of a trainer's trackers."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = feeds

    def offer(self, numbers: Mapping[str, float], step: int) -> None:
        """Pass one step to each; returns at once."""
        for feed in self._feeds:
            feed.offer(numbers, step)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until they have written what they were given, at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.wait(until)


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

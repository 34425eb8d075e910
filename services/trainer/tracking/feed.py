"""Passes numbers to a tracker that may be slow, hang or fail, without waiting for it.

There is one thread per tracker, and a queue with room for `CAPACITY` steps; a tracker that is
further behind misses steps. A problem is logged once, with the remedy, whatever it is and however
often it occurs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from services.trainer.tracking.base import Tracker
from shared.registry import PACKAGE_FAILURES, failure

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

"""Limits how many foreign groups are in progress at once, from whom, and with how many bytes. Pure:
no clock, no I/O.

A group holds a place while it is fetched, examined or stored. While it waits for the scorers it
holds none; otherwise senders of slow groups would block everybody else's.
`shared.tasks.sandbox.foreign_line` limits how many wait there and divides the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.verifier.claims import BytesInFlight

IN_WORK = 64
IN_WORK_PER_SENDER = 4
"""Enough to hide the time that payloads take to arrive. Groups that wait for the scorers also count
here.
"""


class Places:
    """The places in use, by sender."""

    def __init__(self) -> None:
        self._bytes = BytesInFlight()
        self._sender_places: Counter[str] = Counter()
        self._held = 0

    @property
    def free(self) -> bool:
        """Whether one more group may be started."""
        return self._held < IN_WORK

    def fits(self) -> Callable[[str, int], bool]:
        """A function that tests whether a sender's payload of some size may be started, for one
        pass along the queue in its order.
        """
        within = self._bytes.look()
        return lambda sender, size_bytes: self._sender_places[sender] < IN_WORK_PER_SENDER and within(sender, size_bytes)

    def take(self, sender: str, size_bytes: int) -> None:
        """A group of this sender is now in progress."""
        self._sender_places[sender] += 1
        self._hold(sender, size_bytes)

    def leave(self, sender: str, size_bytes: int) -> None:
        """A group of this sender is finished."""
        self._release(sender, size_bytes)
        self._sender_places[sender] -= 1
        if not self._sender_places[sender]:
            del self._sender_places[sender]

    @contextmanager
    def lent(self, sender: str, size_bytes: int) -> Iterator[None]:
        """Give up the place and its bytes inside the block, while the group waits for the
        scorers.
        """
        self._release(sender, size_bytes)
        try:
            yield
        finally:
            self._hold(sender, size_bytes)

    def _hold(self, sender: str, size_bytes: int) -> None:
        self._held += 1
        self._bytes.start(sender, size_bytes)

    def _release(self, sender: str, size_bytes: int) -> None:
        self._held -= 1
        self._bytes.end(sender, size_bytes)

"""Senders that have only ever sent tasks that this node does not accept, which is what two nodes
with different configurations look like.

Pure. A single such group means nothing and is not reported; a sender of nothing else is reported to
the operator, once.
"""

from __future__ import annotations

from collections import OrderedDict

TOLD_AFTER = 8
MAX_SENDERS = 1024


class OtherTasks:
    """Counts, by sender, of groups whose task is not taken in, as long as no other came."""

    def __init__(self) -> None:
        self._refused: OrderedDict[str, int] = OrderedDict()

    def refused(self, sender: str) -> bool:
        """Note a group whose task is not taken in. True when it is time to tell, once for a
        sender.
        """
        count = self._refused.pop(sender, 0) + 1
        self._refused[sender] = count
        if len(self._refused) > MAX_SENDERS:
            self._refused.popitem(last=False)
        return count == TOLD_AFTER

    def accepted(self, sender: str) -> None:
        """Note a group that was taken in."""
        self._refused.pop(sender, None)

    def count(self) -> int:
        """How many senders have been told."""
        return sum(count >= TOLD_AFTER for count in self._refused.values())

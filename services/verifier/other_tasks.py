"""Finds senders that have sent only tasks that this node does not accept, which usually means that
the two nodes are configured differently.

Pure. A single such group means nothing and is not reported; a sender of nothing else is reported to
the operator, once.
"""

from __future__ import annotations

from collections import OrderedDict

TOLD_AFTER = 8
MAX_SENDERS = 1024


class OtherTasks:
    """Counts groups with refused tasks, by sender, for senders that have sent nothing else."""

    def __init__(self) -> None:
        self._refused: OrderedDict[str, int] = OrderedDict()

    def refused(self, sender: str) -> bool:
        """Count a group whose task is not accepted. True, once per sender, when it should be
        reported.
        """
        count = self._refused.pop(sender, 0) + 1
        self._refused[sender] = count
        if len(self._refused) > MAX_SENDERS:
            self._refused.popitem(last=False)
        return count == TOLD_AFTER

    def accepted(self, sender: str) -> None:
        """Record that a group of this sender was accepted."""
        self._refused.pop(sender, None)

    def count(self) -> int:
        """Number of senders that have been reported."""
        return sum(count >= TOLD_AFTER for count in self._refused.values())

"""Keeps a generator below a number of groups per minute. Pure; time is an argument."""

from __future__ import annotations


class Pace:
    """The pace of one generator, which its concurrent calls share."""

    def __init__(self, groups_per_minute: float) -> None:
        """`groups_per_minute`: the most; 0: no limit."""
        self._group_s = 60.0 / groups_per_minute if groups_per_minute else 0.0
        self._free_s = 0.0

    def after(self, groups: int, started_s: float) -> float:
        """When the call that made `groups` groups may be followed by another, on the clock of
        `started_s`, the time at which it began. In the long run all calls together keep the pace;
        at the start each of them makes one call at once.
        """
        self._free_s = max(self._free_s, started_s) + groups * self._group_s
        return self._free_s

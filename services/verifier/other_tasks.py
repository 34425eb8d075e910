"""Senders whose tasks this node does not take in, because the two nodes are configured differently
or have other versions of a package. Nobody is blamed for that. Pure; time is an argument.

`OtherTasks` decides when the operator is told: a single such group means nothing, a sender of
nothing else is reported once. `DerivedOtherwise` saves the work: deriving a task takes a process
and up to a second of CPU time, so a key cannot have it done for each of its messages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.verifier.border_rules import Problem

TOLD_AFTER = 8
MAX_SENDERS = 1024

TRIES = 3
"""Groups of a key and dataset, one after the other, that are derived before its others are refused
underived.
"""
AGAIN_S = 600.0
"""One more group is derived after this time, because its sender may have been updated."""
MAX_DATASETS = 10_000


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


@dataclass(slots=True)
class _Otherwise:
    problem: Problem
    times: int
    until_s: float


class DerivedOtherwise:
    """Remembers the datasets whose tasks come out otherwise here than a key's node said, or cannot
    be derived or judged here.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Otherwise] = OrderedDict()

    def refused(self, public_key: str, dataset: str, problem: Problem, now_s: float) -> None:
        """Record a group of this key whose task differs here."""
        earlier = self._known.pop((public_key, dataset), None)
        times = earlier.times + 1 if earlier else 1
        self._known[public_key, dataset] = _Otherwise(problem, times, now_s + AGAIN_S if times >= TRIES else now_s)
        if len(self._known) > MAX_DATASETS:
            self._known.popitem(last=False)

    def accepted(self, public_key: str, dataset: str) -> None:
        """Record that a group of this key was accepted: its tasks are the same here."""
        self._known.pop((public_key, dataset), None)

    def problem(self, public_key: str, dataset: str, now_s: float) -> Problem | None:
        """Why a group of this key and dataset is refused without deriving its task; None if it may
        be derived. After `AGAIN_S` one may, and the next ones wait for its result as long again.
        """
        known = self._known.get((public_key, dataset))
        if known is None or known.times < TRIES:
            return None
        if now_s >= known.until_s:
            known.until_s = now_s + AGAIN_S
            return None
        reason, detail = known.problem
        return reason, f"{known.times} tasks of {dataset} differed here, so this one was not derived. The last: {detail}"

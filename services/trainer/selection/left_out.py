"""Decides when the trainer's log tells of groups that its steps have left out. Pure; time is an
argument.

Two honest nodes find a few of each other's answers absurd all the time, so a line for each would
teach people to ignore the log. The first group of any other reason is told at once; after that, and
for absurd text, one line tells of all steps since the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from services.trainer.selection.remedies import USUAL_ABSURD, remedies

TOLD_EVERY_S = 600.0
ABSURD_RATIO = 0.1
"""Share of a sender's answers above which absurd text is no longer usual. Among honest nodes it was
at most 5.5 % (docs/trust.md, "Absurd text").
"""
FEW_ANSWERS = 64
"""Fewer answers of a sender say nothing about a share."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What one line says. `groups`: those left out in `steps` steps, by reason; `absurd_ratio`: by
    sender, the share of its answers that were absurd, of those senders where that is unusual.
    """

    groups: dict[str, int]
    steps: int
    absurd_ratio: dict[str, float]
    remedy: dict[str, str]
    usual: bool
    """Whether nobody has to do anything."""


class LeftOutNews:
    """Collects what steps leave out until the next line is due."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._told: set[str] = {"absurd"}
        self._unusual_before: frozenset[str] = frozenset()
        self._steps = 0
        self._groups: Counter[str] = Counter()
        self._absurd: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()

    def note(
        self, groups: Mapping[str, int], absurd_of: Mapping[str, int], answers_of: Mapping[str, int], now_s: float
    ) -> LeftOut | None:
        """Record a step; returns the line that is due, if any.

        Args:
            groups: Number of groups that the step left out, by reason.
            absurd_of, answers_of: Foreign answers that were absurd and that were trained on, by
                sender.
            now_s: A monotonic clock.
        """
        self._steps += 1
        self._groups.update(groups)
        self._absurd.update(absurd_of)
        self._answers.update(absurd_of)
        self._answers.update(answers_of)
        new = {reason for reason, count in groups.items() if count} - self._told
        if not new and now_s - self._since_s < TOLD_EVERY_S:
            return None
        line = self._line() if self._groups.total() else None
        # A line that is early, because of a new reason, does not end the time over which shares are
        # measured.
        if now_s - self._since_s >= TOLD_EVERY_S:
            self._since_s, self._unusual_before = now_s, frozenset(self._unusual())
            self._clear()
        else:
            self._groups.clear()
            self._steps = 0
        self._told |= new
        return line

    def _unusual(self) -> dict[str, float]:
        return {
            node: round(count / self._answers[node], 3)
            for node, count in sorted(self._absurd.items())
            if self._answers[node] >= FEW_ANSWERS and count / self._answers[node] > ABSURD_RATIO
        }

    def _line(self) -> LeftOut:
        """A ban is suggested only for a sender whose text is absurd in two lines' times in
        succession, because a node that was stopped or is behind sends such text for a while.
        """
        unusual, groups = self._unusual(), {reason: count for reason, count in self._groups.items() if count}
        stays = bool(self._unusual_before & unusual.keys())
        remedy = remedies(groups)
        if "absurd" in remedy and not stays:
            remedy["absurd"] = USUAL_ABSURD
        return LeftOut(groups, self._steps, unusual, remedy, usual=not unusual and groups.keys() == {"absurd"})

    def _clear(self) -> None:
        self._steps = 0
        for counts in (self._groups, self._absurd, self._answers):
            counts.clear()

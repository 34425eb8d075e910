"""Two evaluations that asked the same questions, compared question by question. Pure.

Most questions are right in both or wrong in both, and say nothing of a change. Taking the two as
independent samples lets them hide a change that the others show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.contracts.wire import MAX_REWARD
from shared.intervals import estimate

Answer = tuple[float | None, bool | None]
"""An answer's reward, None if it is unknown, and whether it passes, None if no pass is defined."""
LEVEL = 0.05
"""A difference that chance gives less often, in either direction, is told as one."""
_LEAST_GAIN = 0.0005
"""A mean reward that changed by less is shown as the same."""
_MOST_ANSWERS = 10_000
"""The exact test's time grows with their square: 0.1 s for so many."""
ANSWERS_FIELD = "answers"
"""The key of `eval.jsonl` under which an evaluation's answers stand, in `held_out_order`."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """What changed over `n` questions. gain: the mean difference. chance: a difference of this size
    or less may be chance; compared with `gain` it decides. newly_right, lost, p: of passes, the
    questions that changed and the two-sided p of the exact sign test; None where rewards are
    compared, by Student's interval.
    """

    n: int
    gain: float
    chance: float
    newly_right: int | None = None
    lost: int | None = None
    p: float | None = None

    @property
    def words(self) -> str:
        """Such as `6 newly right, 0 lost (p 0.031)`."""
        if self.p is None:
            return f"95 % interval {self.gain - self.chance:+.3f} to {self.gain + self.chance:+.3f} over {self.n:,} questions"
        told = "p < 0.001" if self.p < 0.001 else f"p {self.p:.2g}"
        return f"{self.newly_right:,} newly right, {self.lost:,} lost ({told})"


def paired(before: Sequence[Answer], now: Sequence[Answer], *, by_reward: bool = False) -> Pairs | None:
    """Compare the answers to the same questions, in the same order, by whether they pass (McNemar's
    test in its exact form) or by their rewards. Questions without a known reward in both are left
    out. None: the answers to fewer than two questions are known, or a reward is known in one of the
    two alone: pass rates and pairs would then be of different questions.
    """
    if [one[0] is None for one in before] != [other[0] is None for other in now]:
        return None
    known = [(one, other) for one, other in zip(before, now, strict=True) if one[0] is not None]
    if len(known) < 2:
        return None
    if by_reward:
        found = estimate([(other[0] or 0.0) - (one[0] or 0.0) for one, other in known])
        return Pairs(len(known), found.mean, max(found.half_width or 0.0, _LEAST_GAIN))
    if any(None in (one[1], other[1]) for one, other in known):
        return None
    newly_right = sum(bool(other[1]) > bool(one[1]) for one, other in known)
    lost = sum(bool(one[1]) > bool(other[1]) for one, other in known)
    changed = newly_right + lost
    p, unclear = 1.0, 0
    # Twice the ways in which so many tosses of a coin show heads at most `few` times.
    ways = twice = 2
    for few in range(changed // 2 + 1):
        chance = min(1.0, twice / 2**changed)
        if few == min(newly_right, lost):
            p = chance
        if chance >= LEVEL and not unclear:
            unclear = changed - 2 * few  # the next larger difference is two questions more
        ways = ways * (changed - few) // (few + 1)
        twice += ways
    return Pairs(len(known), (newly_right - lost) / len(known), (unclear + 0.5) / len(known), newly_right, lost, p)


def recorded_answers(line: Mapping[str, Any]) -> tuple[Answer, ...]:
    """The answers of a line of `eval.jsonl`; none if it does not tell all of them."""
    found = line.get(ANSWERS_FIELD)
    if not isinstance(found, list) or len(found) > _MOST_ANSWERS or not all(map(_is_answer, found)):
        return ()
    return tuple((reward if reward is None else float(reward), passed) for reward, passed in found)


def _is_answer(value: Any) -> bool:
    match value:
        case [None | int() | float() as reward, None | bool() as passed]:
            del passed
            return not isinstance(reward, bool) and (reward is None or abs(reward) <= MAX_REWARD)
    return False

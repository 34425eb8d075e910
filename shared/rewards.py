"""Rewards: any finite number that a scorer gives, or unknown for a cause; and when a group's
rewards are informative, which is one definition for sharing, sampling, training and the lab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, StrEnum

_RELATIVE = 1e-9
_ABSOLUTE = 1e-12


SANDBOXED = "no network, no files and no GPU: `sandbox = false` in its [[tasks]] entry allows them"
"""What a scorer cannot have in the sandbox."""


class Mark(IntEnum):
    """Mark of an answer beside its reward: whether its scorer says that it passes, or why there is
    no reward.
    """

    UNSAID = 0
    PASSED = 1
    FAILED = 2
    RAISED = 3
    NOT_A_NUMBER = 4
    TOO_LONG = 5
    TIMEOUT = 6
    KILLED = 7
    NOT_APPLICABLE = 8
    NO_VERDICT = 9

    @property
    def cause(self) -> str:
        """Why the reward is unknown, as a metric's label; empty if it is known."""
        return self.name.lower() if self >= Mark.RAISED else ""


class LocalOnly(StrEnum):
    """Why no group of another node is taken of a task source; a label of the metric
    `swarm_local_only_sources`.
    """

    OUTSIDE_SANDBOX = "outside_sandbox"
    GROUP_DEPENDENT = "group_dependent"
    JUDGED = "judged"
    SCORER = "scorer"

    @property
    def words(self) -> str:
        """The reason as a clause."""
        return _LOCAL_ONLY_WORDS[self]


_LOCAL_ONLY_WORDS = {
    LocalOnly.OUTSIDE_SANDBOX: "the reward runs outside the sandbox (sandbox = false)",
    LocalOnly.GROUP_DEPENDENT: "an answer alone earns otherwise than in a group",
    LocalOnly.JUDGED: "a judge scores it, whose time and money a stranger's groups would take",
    LocalOnly.SCORER: "the dataset's scorer takes answers in which a stranger could hide something",
}


CAUSES = tuple(mark.cause for mark in Mark if mark.cause)
"""Why a reward may be unknown: the scorer raised, returned no finite number, was not asked because
the answer is too long, did not return in time, or its process died; or it says that it does not
apply; or its judge gave no verdict.
"""


def unknown_of(marks: Iterable[Mark]) -> Counter[str]:
    """The number of unknown rewards, by cause."""
    return Counter(mark.cause for mark in marks if mark.cause)


def known_parts(parts: Mapping[str, Sequence[float | None]], rewards: Sequence[float | None]) -> dict[str, list[float | None]]:
    """The values of each of several rewards, for the answers whose whole reward is known."""
    if all(reward is None for reward in rewards):
        return {}
    return {
        name: [value for value, reward in zip(values, rewards, strict=True) if reward is not None] for name, values in parts.items()
    }


def mean_parts(*groups: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """The mean value of each reward over groups' answers, of those to which it applies."""
    known: dict[str, list[float]] = {}
    for name, values in (each for parts in groups for each in parts.items()):
        known.setdefault(name, []).extend(value for value in values if value is not None)
    return {name: round(sum(values) / len(values), 4) for name, values in known.items() if values}


def differ(one: float, other: float) -> bool:
    """Check whether two rewards differ by more than rounding."""
    return abs(one - other) > max(_ABSOLUTE, _RELATIVE * max(abs(one), abs(other)))


def is_informative(rewards: Sequence[float]) -> bool:
    """Check whether rewards differ by more than rounding, so that a comparison between completions
    can teach.
    """
    return len(rewards) > 1 and differ(min(rewards), max(rewards))

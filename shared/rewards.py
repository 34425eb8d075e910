"""When a group's rewards are informative: the one definition for sharing, sampling, training and
the lab.
"""

from __future__ import annotations

from collections.abc import Sequence

_RELATIVE = 1e-9
_ABSOLUTE = 1e-12


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than rounding, so that a comparison between completions can
    teach.
    """
    if len(rewards) < 2:
        return False
    largest = max(abs(reward) for reward in rewards)
    return max(rewards) - min(rewards) > max(_ABSOLUTE, _RELATIVE * largest)

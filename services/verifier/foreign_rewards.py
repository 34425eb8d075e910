"""What a foreign answer earns: full marks or nothing, unless partial credit of strangers is to
count.

A group's advantages ask which of its answers earned more, not whether any is right. Where scorers
pay for what is nearly right ("1200" for "120" earns three quarters), a sender can write groups in
which nobody is right and the near miss is best: training makes the mistake likelier as strongly as
it would a right answer. In sampled groups right answers stand beside near misses.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.evaluation import PASS_REWARD


def foreign_rewards(rewards: Sequence[float], *, partial_credit: bool) -> list[float]:
    """The rewards as they count: with `partial_credit` as they are, else those of passes kept and
    all others 0.
    """
    return [reward if partial_credit or reward >= PASS_REWARD else 0.0 for reward in rewards]

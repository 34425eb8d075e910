"""The reward of a foreign answer: full marks or nothing, unless partial credit of foreign answers
is enabled.

A group's advantages depend on which of its answers earned more, not on whether any is right. If
scorers give partial credit ("1200" for "120" earns three quarters), a sender can write groups in
which no answer is right and a nearly right one is best. Training would then make the mistake more
likely, just as it would a right answer. In honestly sampled groups there are right answers among
the nearly right ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.evaluation import PASS_REWARD


def foreign_rewards(rewards: Sequence[float], *, partial_credit: bool) -> list[float]:
    """The rewards that count: unchanged with `partial_credit`; otherwise those of passing answers,
    and 0 for all others.
    """
    return [reward if partial_credit or reward >= PASS_REWARD else 0.0 for reward in rewards]

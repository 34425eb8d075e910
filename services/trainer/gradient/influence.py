"""Limits how much one foreign group can contribute to a step. Pure arithmetic over token counts and
gradient norms.

There are two bounds. *Share*: in objectives that divide by tokens, a group far longer than the
others counts for at most `factor` times the usual number of tokens, in the loss and in the divisor,
so that it neither outweighs nor dilutes them. *Gradient*: length says little about it, because text
that the policy finds absurd has gradients a hundred times those of text it might have produced. If
the foreign part of a step's gradient is out of proportion to the local part, each foreign group is
measured alone, and one beyond `factor` times a typical group is scaled down to a typical one. An
honest batch is within both bounds, and its gradient is the plain sum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.gradient.rows import TokenGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluenceRules:
    """proportion: the foreign part's norm may be this many times the norm that as many groups like
    the local ones would give.

    factor: if foreign groups are then measured alone, those beyond this many times a typical
    group's norm are scaled down to it; inf: nothing is measured.
    """

    proportion: float = 1.5
    factor: float = math.inf

    @property
    def is_on(self) -> bool:
        """Whether anything is bounded."""
        return math.isfinite(self.factor)


def token_shares(groups: Sequence[TokenGroup], factor: float, kept: Sequence[float]) -> list[float]:
    """For each group, the part of its tokens that counts: 1, or less for a foreign group far longer
    than the others.

    The usual number is the median of the groups' tokens, or the longest local group's if that is
    more. `kept` is the part of each group's completions that is trained on; a group of which half
    is left out may count for half as many.
    """
    lengths = [sum(group.completion_lengths) for group in groups]
    if not lengths:
        return []
    local = [length for length, group in zip(lengths, groups, strict=True) if group.is_local]
    allowed = factor * max(statistics.median_low(lengths), *local, 1)
    return [
        1.0 if group.is_local or length <= part * allowed else part * allowed / length
        for length, group, part in zip(lengths, groups, kept, strict=True)
    ]


def out_of_proportion(
    rules: InfluenceRules, local_norm: float, local_groups: int, foreign_norm: float, foreign_groups: int
) -> bool:
    """Whether the foreign groups must be measured one by one; always if there is no local group to
    compare with.

    Norms of gradients that are independent of each other add like the square root of their number.
    """
    if not rules.is_on or not foreign_groups:
        return False
    if not local_groups or not local_norm > 0.0:
        return True
    # Also true if the norm is NaN.
    return not foreign_norm <= rules.proportion * local_norm * math.sqrt(foreign_groups / local_groups)


def foreign_scales(rules: InfluenceRules, local_norm: float, local_groups: int, foreign_norms: Sequence[float]) -> list[float]:
    """The factor for each foreign group's loss, given only the norm of its gradient.

    1 up to `factor` times the typical norm; beyond that, the factor that makes the norm typical, so
    that exceeding the bound gains nothing; 0 if the norm is not finite. The typical norm is the
    lower median over all groups, where each local one counts as `local_norm / sqrt(local_groups)`,
    or as `local_norm` if that is more. Neither senders of large gradients nor of tiny ones can move
    it while they are the minority.
    """
    typical_local = local_norm / math.sqrt(local_groups) if local_groups and math.isfinite(local_norm) else 0.0
    norms = [*filter(math.isfinite, foreign_norms), *([typical_local] * local_groups)]
    if not norms:
        return [0.0] * len(foreign_norms)
    typical = max(statistics.median_low(norms), typical_local)
    return [_scale(norm, typical, rules.factor) for norm in foreign_norms]


def _scale(norm: float, typical: float, factor: float) -> float:
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= factor * typical else typical / norm

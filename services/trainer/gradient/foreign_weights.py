"""Weights of foreign completions, by the sign of their advantage and by the level at which
likelihoods are compared. Pure.

A foreign completion was sampled by its sender's policy b; the weight w = p / b, with p this node's
(proximal) policy, turns its gradient into that of this node's policy. At the token level every
token has its own ratio; at the sequence level all tokens of an answer share the product of the
ratios (unbiased, with a large variance) or their geometric mean (GSPO, arXiv 2507.18071). Product
and mean need no common tokens: an answer of another tokenizer is weighted from the sum of its
sender's logprobs (HACPO, arXiv 2603.02604).

How w is used depends on the advantage's sign: `capped` is min(w, cap), `at_most_one` is min(w, 1),
`one` is 1. TOPR (arXiv 2503.14286) uses `one` for positive and `at_most_one` for negative
advantages: good answers are learned however unlikely they are, and bad ones are pushed down only as
far as this node's policy would produce them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from services.trainer.objectives.base import LOG_RATIO_BOUND

WeightLevel = Literal["token", "geometric_mean", "sequence"]
WeightRule = Literal["capped", "at_most_one", "one"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRules:
    """level: at which likelihoods are compared. positive, negative: how the ratio is used, by the
    advantage's sign.

    negative_divergence: a completion with a negative advantage is dropped if the mean over its
    tokens of log b - log p is more than this, in nats (DeepSeek-V3.2, arXiv 2512.02556, eq. 9);
    None: never.
    """

    level: WeightLevel = "token"
    positive: WeightRule = "capped"
    negative: WeightRule = "capped"
    negative_divergence: float | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        if self.level not in get_args(WeightLevel):
            raise ValueError(f"foreign weight level {self.level!r} is unknown: use one of {', '.join(get_args(WeightLevel))}")
        for name in ("positive", "negative"):
            if getattr(self, name) not in get_args(WeightRule):
                raise ValueError(
                    f"foreign weight of {name} advantages {getattr(self, name)!r} is unknown: use one of "
                    f"{', '.join(get_args(WeightRule))}"
                )
        if self.negative_divergence is not None and not self.negative_divergence >= 0.0:
            raise ValueError(f"negative_divergence is {self.negative_divergence}: it must be 0 or more, or None")


@dataclass(frozen=True, slots=True)
class ForeignRows:
    """Which of N completions are foreign (N,) bool, their advantages (N,), and what their senders
    said about texts that were encoded again.

    text_sums, text_tokens: (N,) sum of the sender's logprobs over its own tokens, and their number;
    0 tokens: unknown.
    """

    is_foreign: Tensor
    advantages: Tensor
    text_sums: Tensor
    text_tokens: Tensor


@dataclass(frozen=True, slots=True)
class Weighed:
    """weights: (N, T). applies, cut: (N, T) bool, where they apply and where a ratio was above its
    limit. drop: (N,) bool.
    """

    weights: Tensor = field(repr=False)
    applies: Tensor
    cut: Tensor
    drop: Tensor


def weigh_foreign(
    rules: ForeignRules,
    rows: ForeignRows,
    *,
    proximal_logprobs: Tensor,
    log_weights: Tensor,
    known: Tensor,
    mask: Tensor,
    cap: float | None,
) -> Weighed:
    """Weights of the foreign rows among N completions of at most T tokens.

    log_weights: (N, T) proximal - behaviour without any limit, 0 where not `known`; the other
    arguments as in `importance_weights`.
    """
    has_text = rows.is_foreign & ~known.any(dim=1) & (rows.text_tokens > 0)
    own_sums = proximal_logprobs.masked_fill(~mask, 0.0).sum(dim=1)
    own_means = own_sums / mask.sum(dim=1).clamp(min=1)
    text_means = rows.text_sums / rows.text_tokens.clamp(min=1)
    # In float64, in which no sum that a sender may claim overflows.
    token_sums = log_weights.double().sum(dim=1)
    sums = torch.where(has_text, own_sums - rows.text_sums, token_sums)
    means = torch.where(has_text, own_means - text_means, token_sums / known.sum(dim=1).clamp(min=1))
    compared = rows.is_foreign & (has_text | known.any(dim=1))
    by_level = {"token": log_weights, "geometric_mean": means.unsqueeze(1), "sequence": sums.unsqueeze(1)}[rules.level]
    ratios = by_level.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).to(log_weights.dtype).exp().expand_as(log_weights)

    negative = (rows.advantages < 0).unsqueeze(1)
    limits = torch.where(negative, _limit(rules.negative, cap), _limit(rules.positive, cap)).to(ratios.dtype)
    ones = torch.where(negative, rules.negative == "one", rules.positive == "one")
    # Without a ratio there is nothing to cut, and a weight that is always 1 needs no ratio.
    with_ratio = known if rules.level == "token" else mask & compared.unsqueeze(1)
    applies = mask & rows.is_foreign.unsqueeze(1) & (with_ratio | ones)
    bound = rules.negative_divergence
    drop = torch.zeros_like(rows.is_foreign) if bound is None else compared & (rows.advantages < 0) & (-means > bound)
    cut = with_ratio & ~ones & (ratios > limits)
    return Weighed(torch.where(ones, 1.0, torch.minimum(ratios, limits)), applies, cut, drop)


def _limit(rule: WeightRule, cap: float | None) -> float:
    return 1.0 if rule != "capped" else float("inf") if cap is None else cap

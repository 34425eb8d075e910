"""Importance weights, which correct for the difference between the policy that sampled a token and
the one being trained.

Decoupled (AReaL, arXiv 2505.24298): clipping acts on policy / proximal, and this weight, proximal /
behaviour, corrects for staleness and for the inference engine's numerics. It is a constant and
never carries a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.trainer.gradient.foreign_weights import ForeignRows, ForeignRules, weigh_foreign
from services.trainer.objectives.base import LOG_RATIO_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceConfig:
    """cap: truncate a token's weight to this (TIS); None: never.

    sequence_bounds: drop a sequence whose geometric mean weight is outside these bounds; None: keep
    all. unknown_behaviour_logprob: the assumed behaviour logprob, in nats, of tokens in a sequence
    without behaviour logprobs; such a token then weighs `min(1, exp(proximal - this))`, so that
    text which only another policy would write cannot push hard. None: weight 1. foreign: further
    rules for the weights of foreign completions.
    """

    cap: float | None = 2.0
    sequence_bounds: tuple[float, float] | None = None
    unknown_behaviour_logprob: float | None = None
    foreign: ForeignRules = field(default_factory=ForeignRules)

    def __post_init__(self) -> None:
        """Refuse bounds that would drop everything."""
        if self.cap is not None and not self.cap > 0.0:
            raise ValueError(f"importance cap is {self.cap}: it must be more than 0, or None for no cap")
        if self.sequence_bounds is not None:
            low, high = self.sequence_bounds
            if not 0.0 <= low < 1.0 < high:
                raise ValueError(f"sequence_bounds are {self.sequence_bounds}: need 0 <= low < 1 < high")
        if self.unknown_behaviour_logprob is not None and not self.unknown_behaviour_logprob <= 0.0:
            raise ValueError(f"unknown_behaviour_logprob is {self.unknown_behaviour_logprob}: a logprob is 0 or less")

    @property
    def drops_by_likelihood(self) -> bool:
        """Whether the proximal policy's logprobs decide what is dropped."""
        return self.sequence_bounds is not None or self.foreign.negative_divergence is not None


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """weights: (N, T), 1 where there is nothing to correct, 0 on padding. keep: (N, T) bool, False
    drops the token.

    known: (N, T) bool, tokens with a finite behaviour logprob. behaviour_kl: (N, T), k3 sample of
    KL(behaviour || proximal) on those. truncated: (N, T) bool, where the cap applied.
    """

    weights: Tensor
    keep: Tensor
    known: Tensor
    behaviour_kl: Tensor
    truncated: Tensor


def importance_weights(
    config: ImportanceConfig,
    *,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    has_behaviour: Tensor,
    mask: Tensor,
    foreign: ForeignRows | None = None,
) -> ImportanceWeights:
    """Weights `min(exp(proximal - behaviour), cap)` per token, detached; those of foreign rows
    follow `config.foreign`.

    proximal_logprobs, behaviour_logprobs: (N, T). has_behaviour: (N,) bool; a sequence without them
    (sampled with another tokenizer) is trained as if the proximal policy had sampled it, with
    weight 1, or less if `unknown_behaviour_logprob` is set. mask: (N, T) bool, completion tokens.
    foreign: None: no row is foreign. A token whose behaviour logprob is not finite is dropped,
    because nothing says how likely it was.
    """
    proximal = proximal_logprobs.detach()
    expected = mask & has_behaviour.unsqueeze(1)
    known = expected & torch.isfinite(behaviour_logprobs)
    log_weight = (proximal - behaviour_logprobs).masked_fill(~known, 0.0)
    exact = log_weight
    log_weight = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = log_weight.exp()

    keep = mask & (known | ~expected)
    if config.sequence_bounds is not None:
        low, high = config.sequence_bounds
        geometric_mean = (exact.double().sum(dim=1) / known.sum(dim=1).clamp(min=1)).exp()
        inside = (geometric_mean >= low) & (geometric_mean <= high)
        keep = keep & inside.unsqueeze(1)

    truncated = torch.zeros_like(mask)
    capped = weight
    if config.cap is not None:
        truncated = known & (weight > config.cap)
        capped = weight.clamp(max=config.cap)
    if config.unknown_behaviour_logprob is not None:
        assumed = (proximal - config.unknown_behaviour_logprob).clamp(-LOG_RATIO_BOUND, 0.0).exp()
        capped = torch.where(mask & ~has_behaviour.unsqueeze(1), assumed, capped)
    if foreign is not None and config.foreign != ForeignRules():
        found = weigh_foreign(
            config.foreign,
            foreign,
            proximal_logprobs=proximal,
            log_weights=exact,
            known=known,
            mask=mask,
            cap=config.cap,
        )
        truncated = torch.where(found.applies, found.cut, truncated)
        capped = torch.where(found.applies, found.weights, capped)
        keep = keep & ~found.drop.unsqueeze(1)
    return ImportanceWeights(
        weights=capped.masked_fill(~mask, 0.0),
        keep=keep,
        known=known,
        behaviour_kl=(weight - log_weight - 1.0).masked_fill(~known, 0.0),
        truncated=truncated,
    )

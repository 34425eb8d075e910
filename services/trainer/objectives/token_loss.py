"""The loss of every token, before aggregation. Pure: no model, no state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.objectives.config import ObjectiveConfig
from services.trainer.objectives.off_policy import gepo_log_ratio, oapl_loss, vespo_weight


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What an objective says of every token; all (N, T), only `loss` carries a gradient, padding holds 0.

    ratio: policy to proximal policy, of the token (of the sequence for gspo). clipped: bool, the ratio's gradient is
    cut (clipped objectives) or the ratio is clamped (cispo). reference_kl: k3 to the reference, 0 without one.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    reference_kl: Tensor


def token_loss(
    config: ObjectiveConfig,
    *,
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    importance_weights: Tensor | None = None,
    keep: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    behaviour_logprobs: Tensor | None = None,
    log_denominators: Tensor | None = None,
) -> TokenLoss:
    """Loss per token of `config.name`, times the importance weight, plus `kl_coefficient` times k3 to the reference.

    logprobs, proximal_logprobs, reference_logprobs: (N, T) of the completion tokens; only `logprobs` has a gradient.
    advantages: (N,). mask: (N, T) bool, True on completion tokens. importance_weights: (N, T), taken as constants.
    keep: (N, T) bool, False drops a token's whole loss. Values where `mask` is False may be anything finite or not.
    behaviour_logprobs: (N, T), for vespo and oapl; None: the proximal policy sampled. log_denominators: (N,), for gepo; None or
    NaN: the sequence's own, so that its ratio is 1.
    Raises ValueError when a divergence is asked for without a reference.
    """
    if config.needs_reference and reference_logprobs is None:
        raise ValueError(
            f"kl_coefficient is {config.kl_coefficient} but no reference logprobs were given: set it to 0 or give them"
        )
    logprobs = logprobs.masked_fill(~mask, 0.0)
    proximal = proximal_logprobs.detach().masked_fill(~mask, 0.0)
    advantage = advantages.detach().to(logprobs.dtype).unsqueeze(1)

    log_ratio = (logprobs - proximal).clamp(-config.log_ratio_bound, config.log_ratio_bound)
    if config.name == "gspo":
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths).expand_as(log_ratio)
    if config.name == "gepo":
        denominators = logprobs.new_full((len(logprobs),), torch.nan) if log_denominators is None else log_denominators
        of_group = gepo_log_ratio(logprobs, denominators, mask)
        log_ratio = of_group.clamp(-config.log_ratio_bound, config.log_ratio_bound).expand_as(log_ratio)
    ratio = log_ratio.exp()

    if config.uses_behaviour and config.name != "gepo":
        sampled = proximal if behaviour_logprobs is None else behaviour_logprobs.detach().masked_fill(~mask, 0.0)
        present = mask if keep is None else mask & keep
        apart = (logprobs - sampled).clamp(-config.log_ratio_bound, config.log_ratio_bound).masked_fill(~present, 0.0)
        clipped = torch.zeros_like(mask)
        if config.name == "vespo":
            weight = vespo_weight(apart, advantage, config.vespo_positive, config.vespo_negative, config.log_ratio_bound)
            loss = -weight * advantage * logprobs
        else:
            loss = oapl_loss(apart, advantage, config.oapl_scale).expand_as(logprobs)
    elif config.is_clipped:
        loss, clipped = _clipped_surrogate(config, ratio, advantage)
    elif config.name == "cispo":
        bounded = ratio.detach().clamp(config.is_min, config.is_max)
        loss = -bounded * advantage * logprobs
        clipped = (ratio < config.is_min) | (ratio > config.is_max)
    else:
        loss = -advantage * logprobs
        clipped = torch.zeros_like(mask)

    if importance_weights is not None:
        loss = loss * importance_weights.detach().masked_fill(~mask, 0.0)
    reference_kl = torch.zeros_like(logprobs)
    if reference_logprobs is not None:
        reference_kl = k3_divergence(logprobs, reference_logprobs.detach().masked_fill(~mask, 0.0), config.log_ratio_bound)
        if config.needs_reference:
            loss = loss + config.kl_coefficient * reference_kl
    counted = mask if keep is None else mask & keep
    return TokenLoss(
        loss=loss.masked_fill(~counted, 0.0),
        ratio=ratio.detach().masked_fill(~mask, 0.0),
        clipped=clipped.detach() & mask,
        reference_kl=reference_kl.detach().masked_fill(~mask, 0.0),
    )


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor, log_ratio_bound: float = 20.0) -> Tensor:
    """`exp(d) - d - 1` with `d = reference - policy`: a non-negative, unbiased sample of KL(policy || reference).

    Unbiased where the tokens were sampled from the policy (http://joschu.net/blog/kl-approx.html).
    """
    difference = (reference_logprobs - logprobs).clamp(-log_ratio_bound, log_ratio_bound)
    return difference.exp() - difference - 1.0


def _clipped_surrogate(config: ObjectiveConfig, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
    if config.dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -config.dual_clip * advantage), loss)
        clipped = clipped | ((ratio > config.dual_clip) & (advantage < 0))
    return loss, clipped

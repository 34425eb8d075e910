"""The loss of every token, before aggregation. Pure: no model, no state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.trainer.objectives.base import LOG_RATIO_BOUND, Loss, LossTerms
from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.errors import unusable


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """An objective's result for every token; all (N, T), padding is 0. Only `loss` has a gradient,
    and `reference_kl` where the configuration asks for a divergence.

    ratio: policy to proximal policy, as the objective defines it. clipped: bool, the ratio's
    gradient is cut (clipped objectives) or the ratio is clamped (cispo). reference_kl: k3 to the
    reference, 0 without one.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    reference_kl: Tensor


def token_loss(
    configured: ConfiguredObjective,
    *,
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    importance_weights: Tensor | None = None,
    keep: Tensor | None = None,
    masked: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    behaviour_logprobs: Tensor | None = None,
    log_denominators: Tensor | None = None,
) -> TokenLoss:
    """Loss per token of `configured`, times the importance weight, and k3 to the reference, which
    `kl_coefficient` adds to the loss of a step.

    logprobs, proximal_logprobs, reference_logprobs: (N, T) of the completion tokens; only
    `logprobs` has a gradient. advantages: (N,). mask: (N, T) bool, True on completion tokens.
    importance_weights: (N, T), treated as constants. keep: (N, T) bool, False drops a token's loss.
    masked: (N, T) bool, tokens without a loss by the objective's `keeps`, told as clipped. Values
    where `mask` is False may be anything, finite or not. behaviour_logprobs: (N, T), for objectives
    that use them; None: the proximal policy sampled. log_denominators: (N,), for gepo; None or NaN:
    the sequence's own, so that its ratio is 1.

    Raises:
        ObjectiveError: the objective returned something other than a `Loss` of tensors (N, T).
        ValueError: a divergence is requested without a reference.
    """
    settings = configured.settings
    if configured.needs_reference and reference_logprobs is None:
        raise ValueError(
            f"kl_coefficient is {settings.kl_coefficient} but no reference logprobs were given: set it to 0 or give them"
        )
    logprobs = logprobs.masked_fill(~mask, 0.0)
    proximal = proximal_logprobs.detach().masked_fill(~mask, 0.0)
    advantage = advantages.detach().to(logprobs.dtype).unsqueeze(1)

    objective = configured.objective
    present = mask if keep is None else mask & keep
    if masked is not None:
        masked = masked & present
        present = present & ~masked
    behaviour = None
    if objective.uses_behaviour:
        behaviour = proximal if behaviour_logprobs is None else behaviour_logprobs.detach().masked_fill(~mask, 0.0)
    found = objective.loss(
        LossTerms(
            settings=settings,
            logprobs=logprobs,
            proximal=proximal,
            log_ratio=(logprobs - proximal).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
            advantage=advantage,
            mask=mask,
            present=present,
            behaviour=behaviour,
            log_expectation=log_denominators if objective.uses_group_likelihood else None,
        )
    )
    loss, ratio, clipped = _checked(found, configured.name, logprobs)
    if masked is not None:
        clipped = clipped | masked
    if importance_weights is not None:
        loss = loss * importance_weights.detach().masked_fill(~mask, 0.0)
    reference_kl = torch.zeros_like(logprobs)
    if reference_logprobs is not None:
        moving = logprobs if configured.needs_reference else logprobs.detach()
        reference_kl = k3_divergence(moving, reference_logprobs.detach().masked_fill(~mask, 0.0))
    return TokenLoss(
        loss=loss.masked_fill(~present, 0.0),
        ratio=ratio.detach().masked_fill(~mask, 0.0),
        clipped=clipped.detach() & mask,
        reference_kl=reference_kl.masked_fill(~mask, 0.0),
    )


def _checked(found: Any, name: str, logprobs: Tensor) -> Loss:
    """What an objective returned, of which nothing is taken for granted: torch would broadcast a
    wrong shape without a word, or fail far from here.
    """
    if not isinstance(found, tuple) or len(found) != len(Loss._fields):
        raise unusable(name, f"returned a {type(found).__name__}, and must return a Loss of {', '.join(Loss._fields)}")
    for part, each in zip(Loss._fields, found, strict=True):
        if not isinstance(each, Tensor):
            raise unusable(name, f"returned a {type(each).__name__} as {part}, and must return a tensor")
        if each.shape != logprobs.shape:
            shapes = f"shape {tuple(each.shape)}, and must have that of the logprobs, {tuple(logprobs.shape)}"
            raise unusable(name, f"returned {part} of {shapes}")
        if (each.dtype == torch.bool) != (part == "clipped"):
            wanted = "torch.bool" if part == "clipped" else "numbers"
            raise unusable(name, f"returned {part} of {each.dtype}, and it must be of {wanted}")
    return Loss(*found)


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """`exp(d) - d - 1` with `d = reference - policy`: a non-negative, unbiased sample of KL(policy
    || reference).

    Unbiased where the tokens were sampled from the policy (http://joschu.net/blog/kl-approx.html).
    """
    difference = (reference_logprobs - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return difference.exp() - difference - 1.0

"""The loss of every token, the weights that aggregate it into the loss of a batch, and the sums
from which a step's statistics are computed. Pure: no model, no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from services.trainer.objectives.advantages import ADVANTAGES, AdvantageConfig, batch_advantages
from services.trainer.objectives.base import LOG_RATIO_BOUND, Loss, LossTerms, ObjectiveError, unusable
from services.trainer.objectives.config import ConfiguredObjective
from shared.registry import OBJECTIVES, plugin_errors


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
    """Check what an objective returned: torch would broadcast a
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


# The counts are those of the whole optimizer step, before it is split into micro-batches, so that
# splitting changes nothing. Dropped tokens do not count, so that a sender of many of them cannot
# make the others' gradient small.


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Counts over a whole optimizer step: sequences with at least one token of loss, and tokens of
    loss (multiplied by the share of groups that count in part).

    divergence: the same for the divergence to the reference policy, which is a mean of its own:
    over all groups, also those that have no loss otherwise. None: there is no such divergence.
    """

    sequences: int
    tokens: float
    divergence: Normaliser | None = None

    @classmethod
    def count(cls, completion_lengths: Sequence[int], share: float = 1.0) -> Normaliser:
        """Counts for completions of which these numbers of tokens are kept."""
        return cls(sequences=sum(length > 0 for length in completion_lengths), tokens=share * sum(completion_lengths))

    def __add__(self, other: Normaliser) -> Normaliser:
        """Counts of two disjoint parts of a step, such as those of two processes."""
        divergence = other.divergence if self.divergence is None else self.divergence
        if self.divergence is not None and other.divergence is not None:
            divergence = self.divergence + other.divergence
        return Normaliser(self.sequences + other.sequences, self.tokens + other.tokens, divergence)


def token_weights(configured: ConfiguredObjective, keep: Tensor, normaliser: Normaliser) -> Tensor:
    """Weights (N, T) float64 such that `(weights * token_loss).sum()`, added over all
    micro-batches, is the loss.

    keep: (N, T) bool, True on completion tokens that are not dropped. A sequence must not be split
    over micro-batches.
    """
    present = keep.to(torch.float64)
    size = divisor(configured, normaliser)
    match configured.aggregated_by:
        case "token_mean" | "sequence_sum":
            return present / size
        case "fixed_length":
            assert configured.max_completion_tokens is not None
            return present / (size * configured.max_completion_tokens)
        case "sequence_mean":
            return present / present.sum(dim=1, keepdim=True).clamp(min=1.0) / size


def divisor(configured: ConfiguredObjective, normaliser: Normaliser) -> float:
    """Return what grows with a step and divides it: its tokens or its sequences."""
    return max(normaliser.tokens if configured.aggregated_by == "token_mean" else normaliser.sequences, 1)


Number = TypeVar("Number", Tensor, float)

_MAXIMA = ("ratio_max",)


@dataclass(frozen=True, slots=True)
class Sums(Generic[Number]):
    """Sums (and one maximum) over the tokens of a part of a step.

    loss: the aggregated loss. tokens: completion tokens. dropped: tokens without loss (rejected or
    not finite). clipped, ratio, reference_kl, entropy, importance_weight: summed over `tokens`.
    ratio_max: their largest ratio. behaviour_tokens: tokens whose behaviour logprobs are known and
    finite. behaviour_kl, truncated: summed over those.
    """

    loss: Number
    tokens: Number
    dropped: Number
    clipped: Number
    ratio: Number
    ratio_max: Number
    reference_kl: Number
    entropy: Number
    importance_weight: Number
    behaviour_tokens: Number
    behaviour_kl: Number
    truncated: Number


class LossSums(Sums[Tensor]):
    """Sums as 0-d float64 tensors on the tokens' device, so that adding micro-batches never waits
    for the device.
    """

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> LossSums:
        """Sums over nothing."""
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(cls)))

    def __add__(self, other: LossSums) -> LossSums:
        """Sums of two disjoint parts."""
        return LossSums(
            *(
                torch.maximum(getattr(self, field.name), getattr(other, field.name))
                if field.name in _MAXIMA
                else getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            )
        )

    def pack(self) -> Tensor:
        """All sums in one tensor (F,), in the order of the fields."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def unpack(cls, packed: Tensor) -> LossSums:
        """Inverse of `pack`."""
        return cls(*packed.unbind())

    def to_host(self) -> Sums[float]:
        """The same sums as floats, copied in one transfer."""
        return Sums(*(float(value) for value in self.pack().tolist()))


# The trial of an installed objective, so that one that cannot be used is told before a model is
# loaded.

_REWARDS = ([1.0, 0.0, 0.0, 1.0], [0.0] * 7 + [1.0])
"""Of groups of two sizes, as nodes may differ in theirs."""
_MOVED = (0.0, 0.01, -0.01)
"""A batch's first update begins at 0; afterwards tokens become likelier and less likely."""


def trial_problem(configured: ConfiguredObjective) -> str:
    """Why the objective's loss or advantages cannot be used; empty if they can, or if the objective
    is built in.
    """
    if configured.name in OBJECTIVES.built_in:
        return ""
    try:
        for moved in _MOVED:
            _try_loss(configured, moved)
        _try_advantages(configured)
    except ObjectiveError as error:
        return str(error)
    return ""


def _try_loss(configured: ConfiguredObjective, moved: float) -> None:
    """Answers of three tokens and of one, of a policy that has moved by `moved` nats a token; the
    first is good. Their loss must be finite, and so must be its gradient, which has to exist.
    """
    name = configured.name
    logprobs = torch.tensor([[-0.5, -1.0, -2.0], [-0.7, 0.0, 0.0]], requires_grad=True)
    before = logprobs.detach() - moved
    with plugin_errors(lambda why: unusable(name, f"fails on two short answers ({why})"), ObjectiveError):
        loss = token_loss(
            configured,
            logprobs=logprobs,
            proximal_logprobs=before,
            advantages=torch.tensor([1.0, -1.0]),
            mask=torch.tensor([[True, True, True], [True, False, False]]),
            reference_logprobs=before if configured.needs_reference else None,
            log_denominators=before.sum(dim=1) if configured.objective.uses_group_likelihood else None,
        ).loss
        if not loss.isfinite().all():
            raise unusable(name, f"is not finite on two short answers ({loss.tolist()})")
        if not loss.requires_grad:
            raise unusable(name, "does not depend on the logprobs of the policy, so that nothing can be learned from it")
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        if not gradient.isfinite().all():
            raise unusable(name, f"has a gradient that is not finite on two short answers ({gradient.tolist()})")


def _try_advantages(configured: ConfiguredObjective) -> None:
    name, kind = configured.name, configured.objective.advantages
    with plugin_errors(lambda why: unusable(name, f"fails on the rewards of two groups ({why})", ADVANTAGES), ObjectiveError):
        batch_advantages(_REWARDS, AdvantageConfig(kind=kind, objective=name))

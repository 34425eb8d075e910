"""Tries the loss of an installed objective on two short answers, and its advantages on the rewards
of two groups, so that one that cannot be used is told before a model is loaded. Imports torch.
"""

from __future__ import annotations

import torch

from services.trainer.objectives.advantages import ADVANTAGES, AdvantageConfig, batch_advantages
from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.errors import ObjectiveError, unusable
from services.trainer.objectives.token_loss import token_loss
from shared.registry import OBJECTIVES, telling

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
    with telling(lambda why: unusable(name, f"fails on two short answers ({why})"), ObjectiveError):
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
    with telling(lambda why: unusable(name, f"fails on the rewards of two groups ({why})", ADVANTAGES), ObjectiveError):
        batch_advantages(_REWARDS, AdvantageConfig(kind=kind, objective=name))

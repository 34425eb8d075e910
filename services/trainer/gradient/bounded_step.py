"""Computes the gradient of a step: local groups first, then the foreign ones, measured separately,
and bounded if necessary.

While the foreign part is in proportion nothing is changed: the gradient is the plain sum of the
micro-batches. If it is not (`services.trainer.gradient.influence`), every foreign group's gradient
is measured alone, and the foreign part is computed again with the losses of groups beyond the bound
scaled down. That costs two more passes over the foreign groups, only in such steps. While there are
both local and foreign groups, a second copy of the gradients is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.gradient.answer_sums import AnswerPlace, AnswerUse
from services.trainer.gradient.influence import InfluenceRules, foreign_scales, out_of_proportion
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import BatchLogprobs, GradientPart, UpdateConfig, accumulate_part, step_normaliser
from services.trainer.gradient.update_stats import UpdateStats
from services.trainer.objectives.aggregation import Normaliser
from services.trainer.parallel.protocol import ALONE, Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedGradient:
    """Results of `bounded_gradients`, apart from the gradients in `.grad`.

    local_norm, foreign_norm: norms of the two parts before any bound; None for a part without
    groups, and for the foreign part if it is not bounded. scales: factors of the foreign groups
    whose loss was scaled down, by index. uses: what the gradient used of each completion.
    """

    stats: UpdateStats
    local_norm: float | None
    foreign_norm: float | None
    scales: dict[int, float] = field(default_factory=dict)
    uses: dict[AnswerPlace, AnswerUse] = field(default_factory=dict)


def bounded_gradients(
    model: nn.Module,
    groups: Sequence[TokenGroup],
    config: UpdateConfig,
    rules: InfluenceRules,
    *,
    proximal: BatchLogprobs | None = None,
    reference: BatchLogprobs | None = None,
    parallel: Parallel = ALONE,
) -> BoundedGradient:
    """Like `accumulate_gradients` of a step over `groups`, from gradients that are None or 0;
    `rules` bound what foreign groups add.
    """
    step = _Step(model, groups, config, step_normaliser(groups, config, proximal), proximal, reference, parallel)
    local = [number for number, group in enumerate(groups) if config.takes_part(group) and group.is_local]
    foreign = [number for number, group in enumerate(groups) if config.takes_part(group) and not group.is_local]
    part = step.add(local)
    local_norm = step.norm() if local else None
    if not foreign:
        return step.bounded(part, local_norm)
    if not rules.is_on:
        return step.bounded(part + step.add(foreign), local_norm)
    before = step.copied() if local else None
    whole = part + step.add(foreign)
    foreign_norm = step.norm(before)
    scales: dict[int, float] = {}
    pulling = sum(groups[number].moves_policy for number in local)
    if out_of_proportion(rules, local_norm or 0.0, pulling, foreign_norm, len(foreign)):
        norms = []
        for number in foreign:
            step.put(None)
            step.add([number])
            norms.append(step.norm())
        found = zip(foreign, foreign_scales(rules, local_norm or 0.0, pulling, norms), strict=True)
        scales = {number: scale for number, scale in found if scale < 1.0}
        step.put(before)
        whole = part + step.add(foreign, scales)
    return step.bounded(whole, local_norm, foreign_norm, scales)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step's arguments and the gradients accumulated so far."""

    model: nn.Module
    groups: Sequence[TokenGroup]
    config: UpdateConfig
    normaliser: Normaliser
    proximal: BatchLogprobs | None
    reference: BatchLogprobs | None
    parallel: Parallel

    def add(self, numbers: Sequence[int], scales: dict[int, float] | None = None) -> GradientPart:
        groups = list(self.groups)
        for number, scale in (scales or {}).items():
            groups[number] = replace(groups[number], weight=groups[number].weight * scale)
        # A group with scale 0 is left out of the sum but still counts in the normaliser.
        return accumulate_part(
            self.model,
            groups,
            numbers,
            self.config,
            self.normaliser,
            proximal=self.proximal,
            reference=self.reference,
            parallel=self.parallel,
        )

    def bounded(
        self,
        whole: GradientPart,
        local_norm: float | None,
        foreign_norm: float | None = None,
        scales: dict[int, float] | None = None,
    ) -> BoundedGradient:
        """The result, given everything that was added and kept."""
        stats = whole.stats(self.groups, self.config, self.parallel)
        uses = whole.uses(self.groups, self.config, self.parallel)
        return BoundedGradient(stats=stats, local_norm=local_norm, foreign_norm=foreign_norm, scales=scales or {}, uses=uses)

    def copied(self) -> list[Tensor | None]:
        return [None if each.grad is None else each.grad.detach().clone() for each in self._parameters()]

    def put(self, gradients: list[Tensor | None] | None) -> None:
        parameters = self._parameters()
        for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
            parameter.grad = gradient

    def norm(self, before: list[Tensor | None] | None = None) -> float:
        """Norm of the gradients, or of what was added to `before`."""
        gradients = [parameter.grad for parameter in self._parameters()]
        if before is None:
            # All at once on a GPU, where a kernel for each would cost as much as a few layers.
            found = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
            return self.parallel.number(found)
        # One at a time: all differences together would be another copy of the gradients.
        norms: list[Any] = [
            torch.linalg.vector_norm(gradient.detach() if earlier is None else gradient.detach() - earlier)
            for gradient, earlier in zip(gradients, before, strict=True)
            if gradient is not None
        ]
        return self.parallel.number(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

"""The gradient of a step: local groups first, then the foreign ones, measured separately, and
bounded if necessary.

There are two bounds on what one foreign group can contribute. *Share*: in objectives that divide by
tokens, a group far longer than the others counts for at most `factor` times the usual number of
tokens, in the loss and in the divisor, so that it neither outweighs nor dilutes them. *Gradient*:
length says little about it, because text that the policy finds absurd has gradients a hundred times
those of text it might have produced. While the foreign part of the gradient is in proportion to the
local part, nothing is changed: the gradient is the plain sum of the micro-batches. If it is not,
every foreign group's gradient is measured alone, and one beyond `factor` times a typical group is
scaled down to a typical one. That costs two more passes over the foreign groups, only in such
steps. Where no local group moves the policy there is nothing to be in proportion to: each foreign
group is measured as it is added, and a second pass is made only if one is scaled down. While there
are both local and foreign groups, a second copy of the gradients is kept.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import (
    AnswerPlace,
    AnswerUse,
    BatchLogprobs,
    GradientPart,
    UpdateConfig,
    UpdateStats,
    accumulate_part,
    step_normaliser,
)
from services.trainer.objectives.token_loss import Normaliser
from services.trainer.parallel import ALONE, Parallel
from shared.config.trainer_section import TrainerSection


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluenceRules:
    """proportion: the foreign part's norm may be this many times the norm that as many groups like
    the local ones would give.

    factor: if foreign groups are then measured alone, those beyond this many times a typical
    group's norm are scaled down to it; inf: nothing is measured.
    """

    proportion: float = 1.5
    factor: float = math.inf

    @classmethod
    def of(cls, trainer: TrainerSection) -> InfluenceRules:
        """The bound of a node's configuration; 0 there means none."""
        return cls(proportion=trainer.constants.foreign_norm_proportion, factor=trainer.constants.foreign_norm_factor or math.inf)

    @property
    def is_on(self) -> bool:
        return math.isfinite(self.factor)


def token_shares(groups: Sequence[TokenGroup], factor: float, kept: Sequence[float]) -> list[float]:
    """For each group, the part of its tokens that counts: 1, or less for a foreign group far longer
    than the others.

    The usual number is the median of the groups' tokens, or the longest local group's if that is
    more. `kept` is the part of each group's completions that is trained on; a group of which half
    is left out may count for half as many.
    """
    lengths = [sum(group.sampled_lengths) for group in groups]
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
    """Say whether the foreign groups must be measured one by one; always if there is no local group
    to compare with.

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


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update: the gradient, its norm, whether the weights moved, and its seconds."""

    gradient: BoundedGradient
    grad_norm: float
    moved: bool
    forward_backward_s: float
    optimizer_s: float


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """The part of a step's record that its optimizer updates know.

    updated: False when no group had an advantage (or a gradient was not finite): the step counts,
    the weights stay. tokens: completion tokens of the groups that took part; loss to kl_reference:
    means over them, and over the updates. None where no token took part: nothing was measured, and
    0 would be a claim. importance_ratio: policy to proximal policy. importance_weight: proximal to
    behaviour after truncation. kl_behaviour: nats per token (k3). grad_norm_local,
    grad_norm_foreign: norms of what local (replayed ones included) and foreign groups give to the
    gradient before any bound; None without such groups. groups_bounded: foreign groups that were
    held to the bound of a group's gradient, most in any update; bounded_of: by node.
    """

    updated: bool
    updates: int
    tokens: int
    loss: float | None
    grad_norm: float | None
    entropy: float | None
    clip_fraction: float | None
    importance_ratio: float | None
    importance_ratio_max: float | None
    importance_weight: float | None
    truncated_fraction: float | None
    dropped_fraction: float | None
    kl_behaviour: float | None
    kl_reference: float | None
    learning_rate: float
    grad_norm_local: float | None = None
    grad_norm_foreign: float | None = None
    groups_bounded: int = 0
    bounded_of: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, updates: Sequence[Update], learning_rate: float, nodes: Sequence[str]) -> UpdateRecord:
        """nodes: the node of each group of the step."""
        # Means over no tokens are 0 (`UpdateStats`), which a reader would take for measurements.
        measured = [update.gradient.stats for update in updates if update.gradient.stats.tokens]

        def mean(name: str) -> float | None:
            return mean_of([float(getattr(stats, name)) for stats in measured])

        bounded = Counter(nodes[number] for number in max((update.gradient.scales for update in updates), key=len))
        return cls(
            updated=updates[0].moved,
            updates=sum(update.moved for update in updates),
            tokens=updates[0].gradient.stats.tokens,
            loss=mean("loss"),
            grad_norm=mean_of([update.grad_norm for update in updates if update.gradient.stats.tokens]),
            entropy=mean("entropy"),
            clip_fraction=mean("clip_fraction"),
            importance_ratio=mean("ratio_mean"),
            importance_ratio_max=max((stats.ratio_max for stats in measured), default=None),
            importance_weight=mean("importance_weight_mean"),
            truncated_fraction=mean("truncated_fraction"),
            dropped_fraction=mean("dropped_fraction"),
            kl_behaviour=mean("kl_behaviour"),
            kl_reference=mean("kl_reference"),
            learning_rate=learning_rate,
            grad_norm_local=mean_of([norm for update in updates if (norm := update.gradient.local_norm) is not None]),
            grad_norm_foreign=mean_of([norm for update in updates if (norm := update.gradient.foreign_norm) is not None]),
            groups_bounded=bounded.total(),
            bounded_of=dict(sorted(bounded.items())),
        )


def mean_of(values: Sequence[float]) -> float | None:
    """The mean; None of no values, because a mean over nothing is not 0."""
    return sum(values) / len(values) if values else None


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
    pulling = sum(groups[number].moves_policy for number in local)
    if pulling and local_norm is not None and local_norm > 0.0:
        whole = part + step.add(foreign)
        foreign_norm = step.norm(before)
        if not out_of_proportion(rules, local_norm, pulling, foreign_norm, len(foreign)):
            return step.bounded(whole, local_norm, foreign_norm)
        norms = []
        for number in foreign:
            step.put(None)
            step.add([number])
            norms.append(step.norm())
    else:
        norms, added = step.add_measured(foreign)
        whole, foreign_norm = part + added, step.norm()
        step.put_sum(before)
    found = zip(foreign, foreign_scales(rules, local_norm or 0.0, pulling, norms), strict=True)
    scales = {number: scale for number, scale in found if scale < 1.0}
    if scales or pulling:
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

    def add_measured(self, numbers: Sequence[int]) -> tuple[list[float], GradientPart]:
        """The norm of each group's gradient alone. Afterwards the gradients are the groups' sum."""
        norms, parts, total = [], [], None
        for number in numbers:
            self.put(None)
            parts.append(self.add([number]))
            norms.append(self.norm())
            self.put_sum(total)
            total = [parameter.grad for parameter in self._parameters()]
        return norms, reduce(operator.add, parts)

    def put_sum(self, gradients: list[Tensor | None] | None) -> None:
        """Add `gradients` to those that there are."""
        for parameter, gradient in zip(self._parameters(), gradients or (), strict=bool(gradients)):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

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

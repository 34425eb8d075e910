"""The gradient of a step: local groups, then each foreign group alone, bounded as it is added.

There are two bounds on what one foreign group can contribute. *Share*: in objectives that divide by
tokens, a group far longer than the others counts for at most `factor` times the usual number of
tokens, in the loss and in the divisor, so that it neither outweighs nor dilutes them. *Gradient*:
length says little about it, because text that the policy finds absurd has gradients a hundred times
those of text it might have produced. Every group goes through the model once. A foreign group whose
gradient is beyond `factor` times a usual one is scaled down to a usual one. While there are foreign
groups, a second copy of the gradients is kept.

What is usual follows from the last `RECENT_GROUPS` local groups, because a step has few of them and
often none that moves the policy. Only a node that has never had one takes the median of the foreign
groups of its first step, and computes them twice if that scales one down.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from services.trainer.gradient.answer_uses import AnswerPlace, AnswerUse
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import (
    BatchLogprobs,
    FirstPass,
    GradientPart,
    UpdateConfig,
    UpdateStats,
    accumulate_part,
    step_normaliser,
)
from services.trainer.objectives.token_loss import Normaliser, divisor
from services.trainer.parallel import ALONE, Parallel
from shared.config.trainer_section import TrainerSection


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluenceRules:
    """factor: a foreign group whose gradient's norm is more than this many times a usual group's is
    scaled down to it; inf: nothing is measured.
    """

    factor: float = math.inf

    @classmethod
    def of(cls, trainer: TrainerSection) -> InfluenceRules:
        """The bound of a node's configuration; 0 there means none."""
        return cls(factor=trainer.constants.foreign_norm_factor or math.inf)

    @property
    def is_on(self) -> bool:
        return math.isfinite(self.factor)

    def scale(self, norm: float, usual: float) -> float:
        """The factor on a foreign group's gradient, given its norm and a usual group's: 1 up to the
        bound; beyond it, what makes the norm usual, so that exceeding the bound gains nothing; 0 if
        the norm is not finite.
        """
        if not math.isfinite(norm):
            return 0.0
        return 1.0 if norm <= self.factor * usual else usual / norm


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


RECENT_GROUPS = 16
"""What is usual is the mean over so many local groups, because a step has few of them."""


def usual_norm(recent: Sequence[float]) -> float | None:
    """The root mean square of the norms; None of none."""
    return math.sqrt(math.fsum(norm**2 for norm in recent) / len(recent)) if recent else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedGradient:
    """Results of `bounded_gradients`, apart from the gradients in `.grad`.

    local_norm: norm of the local part; foreign_norm: the same before any bound, if the groups'
    gradients are independent (root of the sum of squares); None for a part without groups, and for
    the foreign part if it is not bounded. scales: factors of the foreign groups whose gradient was
    scaled down, by index. uses: what the gradient used of each completion. recent: norms of the
    last local groups that moved the policy, before they are divided by the step's size.
    """

    stats: UpdateStats
    local_norm: float | None
    foreign_norm: float | None
    scales: dict[int, float] = field(default_factory=dict)
    uses: dict[AnswerPlace, AnswerUse] = field(default_factory=dict)
    recent: list[float] = field(default_factory=list)


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
    gradient before any bound (`BoundedGradient`); None without such groups. groups_bounded: foreign
    groups that were held to the bound of a group's gradient, most in any update; bounded_of: by
    node.
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
    first: FirstPass | None = None,
    recent: Sequence[float] = (),
) -> BoundedGradient:
    """Like `accumulate_gradients` of a step over `groups`, from gradients that are None or 0;
    `rules` bound what foreign groups add.

    first: what this update finds out for the later ones of the batch. The places in `uses` are
    those among the answers that took part. recent: from the step before.
    """
    normaliser = step_normaliser(groups, config, proximal)
    step = _Step(model, groups, config, normaliser, proximal, reference, parallel, first)
    size = divisor(config.objective, normaliser)
    local = [number for number, group in enumerate(groups) if config.takes_part(group) and group.is_local]
    foreign = [number for number, group in enumerate(groups) if config.takes_part(group) and not group.is_local]
    # Weights that are cast for autocast stay cast until the outermost context ends. Sharded ones
    # are gathered anew for each pass, and a cast of before belongs to tensors that are gone.
    with torch.autocast(next(model.parameters()).device.type, enabled=False) if parallel is ALONE else nullcontext():
        whole = step.add(local)
        local_norm = step.norm() if local else None
        pulling = sum(groups[number].moves_policy for number in local)
        if local_norm and pulling and math.isfinite(local_norm):
            recent = [*recent, *[local_norm / math.sqrt(pulling) * size] * pulling][-RECENT_GROUPS:]
        norms: dict[int, float] = {}
        scales: dict[int, float] = {}
        if foreign and rules.is_on:
            before = step.gradients(copied=not recent)
            usual = usual_norm([norm / size for norm in recent])
            added, norms = step.add_each(foreign, rules, usual)
            if usual is None:
                usual = statistics.median_low([norm for norm in norms.values() if 0.0 < norm < math.inf] or [0.0])
                recent = [usual * size]
                if any(rules.scale(norm, usual) < 1.0 for norm in norms.values()):
                    step.put(before)
                    added, norms = step.add_each(foreign, rules, usual)
            whole = whole + added
            scales = {number: scale for number, norm in norms.items() if (scale := rules.scale(norm, usual)) < 1.0}
        elif foreign:
            whole = whole + step.add(foreign)
    factor = 1.0
    if first is not None:
        first.gather(model, groups, config, parallel)
        groups = first.groups
        factor = size / divisor(config.objective, step_normaliser(groups, config))
        whole = first.counted(whole, factor)
        step.multiply(factor)
    return BoundedGradient(
        stats=whole.stats(groups, config, parallel),
        local_norm=None if local_norm is None else local_norm * factor,
        foreign_norm=math.sqrt(math.fsum(norm**2 for norm in norms.values())) * factor if any(norms.values()) else None,
        scales=scales,
        uses=whole.uses(groups, config, parallel),
        recent=list(recent),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """One step's arguments, and the gradients accumulated so far in the parameters' `.grad`."""

    model: nn.Module
    groups: Sequence[TokenGroup]
    config: UpdateConfig
    normaliser: Normaliser
    proximal: BatchLogprobs | None
    reference: BatchLogprobs | None
    parallel: Parallel
    first: FirstPass | None

    def add(self, numbers: Sequence[int]) -> GradientPart:
        return accumulate_part(
            self.model,
            self.groups,
            numbers,
            self.config,
            self.normaliser,
            proximal=self.proximal,
            reference=self.reference,
            parallel=self.parallel,
            first=self.first,
        )

    def add_each(self, numbers: Sequence[int], rules: InfluenceRules, usual: float | None) -> tuple[GradientPart, dict[int, float]]:
        """Add one group after another, each scaled by the norm of its own gradient; without `usual`
        none is scaled. Returns the norms.
        """
        whole, norms = GradientPart.nothing(self.model), {}
        total = self.gradients()
        for number in numbers:
            self.put([None] * len(total))
            part = self.add([number])
            norms[number] = norm = self.norm()
            scale = 1.0 if usual is None else rules.scale(norm, usual)
            whole = whole + part.scaled(scale)
            # All answers of a group without a gradient were left out.
            for place, gradient in enumerate(self.gradients() if norm and scale else ()):
                if gradient is not None:
                    earlier = total[place]
                    total[place] = gradient.mul_(scale) if earlier is None else earlier.add_(gradient, alpha=scale)
        self.put(total)
        return whole, norms

    def gradients(self, *, copied: bool = False) -> list[Tensor | None]:
        found = [parameter.grad for parameter in self._parameters()]
        return [None if each is None else each.clone() for each in found] if copied else found

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters(), gradients, strict=True):
            parameter.grad = gradient

    def multiply(self, factor: float) -> None:
        # None at all if every answer that could have moved the policy was left out.
        if factor != 1.0 and (found := [gradient for gradient in self.gradients() if gradient is not None]):
            torch._foreach_mul_(found, factor)

    def norm(self) -> float:
        """Norm of the gradients."""
        # All at once on a GPU, where a kernel for each would cost as much as a few layers.
        return self.parallel.number(torch.nn.utils.get_total_norm([each for each in self.gradients() if each is not None]))

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

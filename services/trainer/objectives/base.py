"""The interface of an objective: the loss of a token, declarations for the code around that loss,
and the clipped surrogate `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` that most objectives
share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from shared.registry import OBJECTIVES
from shared.runtime.exits import FatalError

if TYPE_CHECKING:
    from torch import Tensor

    from shared.config.trainer_section import ObjectiveSection

LOG_RATIO_BOUND = 20.0
"""Log ratios, of a token or of a whole answer, are clamped to +- this before exp: e^20 is far
beyond any clip, and finite.
"""

Aggregation = Literal["sequence_mean", "token_mean", "fixed_length", "sequence_sum"]
AdvantageScale = Literal["group", "batch", "none"]
GroupAdvantages = Callable[[Sequence[float]], list[float]]
"""Advantages of a group's completions from their rewards, which are never all equal."""
AdvantageKind = Literal["group_normalised", "leave_one_out", "soft_value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The inputs of a loss. N sequences of T completion tokens; padding is 0, and only `logprobs`
    has a gradient.

    settings: the objective's part of `[trainer]`, with the clip bounds in force; an installed
    objective's own are in `settings.objective_options`. logprobs: (N, T) of the policy being
    trained. proximal: (N, T) of the policy when the batch arrived. log_ratio: (N, T) their
    difference, within +- `LOG_RATIO_BOUND`. advantage: (N, 1). mask: (N, T) bool, True on
    completion tokens. present: `mask` without dropped tokens, and without those that the
    objective's `keeps` masks. behaviour: (N, T) of the policy that sampled, `proximal` where that
    is unknown; None unless the objective `uses_behaviour`. log_expectation: (N,) log of the group's
    expected likelihood, NaN if unknown; None unless the objective `uses_group_likelihood`.
    """

    settings: ObjectiveSection
    logprobs: Tensor
    proximal: Tensor
    log_ratio: Tensor
    advantage: Tensor
    mask: Tensor
    present: Tensor
    behaviour: Tensor | None = None
    log_expectation: Tensor | None = None

    def option(self, name: str) -> float:
        """A constant from `Objective.options`, or as `trainer.objective_options` sets it."""
        return float(self.settings.objective_options[name])

    def from_behaviour(self) -> Tensor:
        """(N, T) bounded log ratio to the policy that sampled, with gradient, 0 where a token is
        not present.
        """
        assert self.behaviour is not None
        log_ratio = (self.logprobs - self.behaviour).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return log_ratio.masked_fill(~self.present, 0.0)


class Loss(NamedTuple):
    """The loss of each token, before importance weights, divergence and aggregation; all (N, T).

    ratio: policy to proximal policy, as the objective defines it. clipped: bool, True where the
    ratio's gradient is cut or the ratio clamped.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective, as registered in the entry-point group `swarm.objectives`: everything that its
    source publishes under its name. `aggregation`, `scale`, `clip` and `counts_uninformative` hold
    where the configuration does not say.

    loss: from `LossTerms`. aggregation: what the loss is averaged over. advantages: how rewards
    become advantages. scale: what group-normalised advantages are divided by. clips: it uses
    `clip_low`, `clip_high` and `dual_clip`, which have an effect where the ratio is not 1. clip:
    those two bounds. moves_at_once: its ratio is not 1 in the first update on a batch.
    uses_behaviour: it uses the sampling policy's logprobs itself, so that importance weights do not
    apply. uses_group_likelihood: it needs the likelihood that the senders of its group gave to
    their answers. counts_uninformative: whether groups with equal rewards count in the means.
    keeps: which tokens of an update have a loss, as (N,) bool, from (N,) log of policy to behaviour
    and (N,) advantages of all its tokens; the others still count in the means. None: all of them.
    options: its constants that `trainer.objective_options` can set, with their
    defaults: numbers above 0, or of at least 0 where the default is. differs: what is
    deliberately not as in its source; a sentence for users.
    """

    name: str
    loss: Callable[[LossTerms], Loss]
    aggregation: Aggregation
    advantages: AdvantageKind | GroupAdvantages = "group_normalised"
    scale: AdvantageScale = "group"
    clips: bool = False
    clip: tuple[float, float] = (0.2, 0.28)
    moves_at_once: bool = False
    uses_behaviour: bool = False
    uses_group_likelihood: bool = False
    counts_uninformative: bool = False
    keeps: Callable[[Tensor, Tensor, ObjectiveSection], Tensor] | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    differs: str = ""

    @property
    def divides_by_deviation(self) -> bool:
        """Say whether the settings of a group's standard deviation apply."""
        return self.advantages == "group_normalised"


class ObjectiveError(FatalError):
    """An objective's loss or advantages cannot be used. The message names the objective and what is
    wrong.
    """


def unusable(name: str, why: str, part: str = "loss") -> ObjectiveError:
    """The error of an objective with a part of which `why` tells what is wrong."""
    return ObjectiveError(f"the {part} of {OBJECTIVES.described(name)} {why}: correct it, or change {OBJECTIVES.setting}")


def clipped_loss(terms: LossTerms) -> Loss:
    """The clipped loss with r the token's own ratio to the proximal policy."""
    return clipped(terms, terms.log_ratio.exp())


def clipped(terms: LossTerms, ratio: Tensor) -> Loss:
    """The clipped loss with any `ratio` (N, T). If A < 0, the loss is at most `dual_clip` times |A|
    (arXiv 1912.09729).
    """
    settings, advantage = terms.settings, terms.advantage
    assert settings.clip_low is not None and settings.clip_high is not None, "`ConfiguredObjective` fills them in"
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    loss = -(ratio * advantage).minimum(ratio.clamp(low, high) * advantage)
    cut = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
    if dual_clip := float(settings.objective_options.get("dual_clip", 0.0)):
        loss = loss.minimum(-dual_clip * advantage).where(advantage < 0, loss)
        cut = cut | ((ratio > dual_clip) & (advantage < 0))
    return Loss(loss, ratio, cut)


def plain_loss(terms: LossTerms) -> Loss:
    """`-A lp`, without clipping."""
    return Loss(-terms.advantage * terms.logprobs, terms.log_ratio.exp(), terms.mask.new_zeros(terms.mask.shape))

"""Importance weights, which correct for the difference between the policy that sampled a token and
the one being trained.

Decoupled (AReaL, arXiv 2505.24298): clipping acts on policy / proximal, and this weight, proximal /
behaviour, corrects for staleness and for the inference engine's numerics. It is a constant and
never carries a gradient. Where the policies that sampled are unknown or the objective masks tokens,
the functions at the end say which tokens a step keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from services.trainer.gradient.rows import CompletionRows, TokenGroup
from services.trainer.objectives.base import LOG_RATIO_BOUND, Objective
from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.gepo import gepo_log_expectation
from shared.config.trainer_section import TrainerSection

# A foreign completion was sampled by its sender's policy b; the weight w = p / b, with p this
# node's (proximal) policy, turns its gradient into that of this node's policy. At the token level
# every token has its own ratio; at the sequence level all tokens of an answer share the product of
# the ratios (unbiased, with a large variance) or their geometric mean (GSPO, arXiv 2507.18071).
# Product and mean need no common tokens: an answer of another tokenizer is weighted from the sum of
# its sender's logprobs (HACPO, arXiv 2603.02604).
#
# How w is used depends on the advantage's sign: `capped` is min(w, cap), `at_most_one` is min(w,
# 1), `one` is 1. TOPR (arXiv 2503.14286) uses `one` for positive and `at_most_one` for negative
# advantages: good answers are learned however unlikely they are, and bad ones are pushed down only
# as far as this node's policy would produce them.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceConfig:
    """cap: truncate a token's weight to this (TIS); None: never.

    sequence_bounds: drop a sequence whose geometric mean weight is outside these bounds; None: keep
    all. foreign: further rules for the weights of foreign completions.
    """

    cap: float | None = 2.0
    sequence_bounds: tuple[float, float] | None = None
    foreign: ForeignRules = field(default_factory=ForeignRules)

    @classmethod
    def of(cls, trainer: TrainerSection) -> ImportanceConfig:
        """The weights that a node's configuration asks for."""
        return cls(
            cap=trainer.constants.importance_cap,
            sequence_bounds=trainer.constants.sequence_mask,
            foreign=ForeignRules(
                level=trainer.constants.foreign_weight_level,
                positive=trainer.constants.foreign_weight_positive,
                negative=trainer.constants.foreign_weight_negative,
                negative_divergence=trainer.constants.foreign_negative_divergence,
            ),
        )

    def __post_init__(self) -> None:
        """Refuse bounds that would drop everything."""
        if self.cap is not None and not self.cap > 0.0:
            raise ValueError(f"importance cap is {self.cap}: it must be more than 0, or None for no cap")
        if self.sequence_bounds is not None:
            low, high = self.sequence_bounds
            if not 0.0 <= low < 1.0 < high:
                raise ValueError(f"sequence_bounds are {self.sequence_bounds}: need 0 <= low < 1 < high")

    @property
    def drops_by_likelihood(self) -> bool:
        """Say whether the proximal policy's logprobs decide what is dropped."""
        return self.sequence_bounds is not None or self.foreign.negative_divergence is not None


def uses_foreign_logprobs(trainer: TrainerSection, objective: Objective) -> bool:
    """Return whether a step depends on the behaviour logprobs of foreign groups. With the defaults
    it does not: good answers weigh 1, and bad ones are left out.
    """
    rules = ImportanceConfig.of(trainer)
    negatives = rules.foreign.negative != "one" and not trainer.constants.drop_foreign_negatives
    weighed = rules.foreign.positive != "one" or negatives or rules.drops_by_likelihood
    return weighed or objective.uses_behaviour or objective.uses_group_likelihood or objective.keeps is not None


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
    weight 1. mask: (N, T) bool, completion tokens.
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


def foreign_rows(groups: Sequence[TokenGroup], sequences: Sequence[tuple[int, int]], device: torch.device) -> ForeignRows:
    """The foreign rows of completions given as (group, completion)."""
    texts = [groups[group].text_logprob(completion) for group, completion in sequences]
    return ForeignRows(
        is_foreign=torch.tensor([not groups[group].is_local for group, _ in sequences], device=device),
        advantages=torch.tensor([groups[g].advantages[c] for g, c in sequences], dtype=torch.float64, device=device),
        text_sums=torch.tensor([text.total if text else 0.0 for text in texts], dtype=torch.float64, device=device),
        text_tokens=torch.tensor([text.tokens if text else 0 for text in texts], device=device),
    )


def kept_tokens(config: ImportanceConfig, group: TokenGroup, number: int, proximal_logprobs: Tensor | None = None) -> int:
    """Count the tokens of completion `number` that `importance_weights` keeps.

    proximal_logprobs: (tokens,). Without them, tokens that would be dropped for their likelihood
    count as kept.
    """
    behaviour, tokens = group.behaviour_logprobs[number], len(group.completions[number])
    sampled = group.sampled_of(number) or [True] * tokens
    if proximal_logprobs is None or not config.drops_by_likelihood:
        return sum(sampled) if behaviour is None else len(known_logprobs(group, number))
    correction = importance_weights(
        config,
        proximal_logprobs=proximal_logprobs.unsqueeze(0),
        behaviour_logprobs=torch.tensor([list(behaviour or [0.0] * tokens)], dtype=proximal_logprobs.dtype),
        has_behaviour=torch.tensor([behaviour is not None]),
        mask=torch.tensor([list(sampled)]),
        foreign=foreign_rows([group], [(0, number)], torch.device("cpu")),
    )
    return int(correction.keep.sum())


def behaviour_or(groups: Sequence[TokenGroup], rows: CompletionRows, proximal_logprobs: Tensor) -> Tensor:
    """(N, T) behaviour logprobs, replaced by `proximal_logprobs` where they are unknown, so that
    the ratio to them is 1.
    """
    behaviour = rows.pad([group.behaviour_logprobs for group in groups], proximal_logprobs.dtype)
    has = [groups[group].behaviour_logprobs[completion] is not None for group, completion in rows.sequences]
    known = torch.tensor(has, device=behaviour.device).unsqueeze(1) & torch.isfinite(behaviour)
    return torch.where(known, behaviour, proximal_logprobs.detach())


def log_expectations(groups: Sequence[TokenGroup], rows: CompletionRows, dtype: torch.dtype) -> Tensor:
    """(N,) log of each completion's group expectation (`gepo_log_expectation`); NaN if nothing is
    known of the group.
    """
    expectations = {index: gepo_log_expectation(_mean_logprobs(groups[index])) for index in {group for group, _ in rows.sequences}}
    return torch.tensor([expectations[group] for group, _ in rows.sequences], dtype=dtype, device=rows.mask.device)


def masked_by_objective(
    groups: Sequence[TokenGroup], numbers: Sequence[int], logprobs: Sequence[Sequence[Tensor]], configured: ConfiguredObjective
) -> list[TokenGroup]:
    """`groups` with the tokens marked that the objective's `keeps` gives no loss in an update.

    numbers: indexes of the groups that take part. logprobs: `batch_logprobs` before the update;
    where a token's behaviour is not known, they take its place.
    """
    keeps = configured.objective.keeps
    places = [(group, completion) for group in numbers for completion in range(len(groups[group].completions))]
    if not places or keeps is None:
        return list(groups)
    current = [logprobs[g][c].to(torch.float64) for g, c in places]
    behaviours = [
        each if (known := groups[g].behaviour_logprobs[c]) is None else torch.tensor(list(known), dtype=torch.float64)
        for (g, c), each in zip(places, current, strict=True)
    ]
    advantages = [torch.full_like(each, groups[g].advantages[c]) for (g, c), each in zip(places, current, strict=True)]
    log_ratios = torch.cat(current) - torch.cat(behaviours)
    of_policy = [group.sampled_of(c) or [True] * len(group.completions[c]) for group, c in ((groups[g], c) for g, c in places)]
    log_ratios = log_ratios.where(torch.tensor([each for marks in of_policy for each in marks]), torch.nan)
    keep = keeps(log_ratios, torch.cat(advantages), configured.settings)
    masked = [(~part).to(torch.float64).tolist() for part in torch.split(keep, [len(each) for each in current])]
    of_group: dict[int, list[list[float]]] = {}
    for (group, _), each in zip(places, masked, strict=True):
        of_group.setdefault(group, []).append(each)
    return [replace(group, masked=of_group.get(index, ())) for index, group in enumerate(groups)]


def known_logprobs(group: TokenGroup, number: int) -> list[float]:
    """The finite behaviour logprobs of the tokens of a completion that its policy sampled."""
    behaviour = group.behaviour_logprobs[number] or ()
    sampled = group.sampled_of(number) or [True] * len(behaviour)
    return [each for each, of_policy in zip(behaviour, sampled, strict=True) if of_policy and math.isfinite(each)]


def _mean_logprobs(group: TokenGroup) -> list[float]:
    """Mean logprob per token of each completion whose sender's logprobs are known."""
    found = []
    for number, behaviour in enumerate(group.behaviour_logprobs):
        text = group.text_logprob(number)
        if behaviour is not None and (known := known_logprobs(group, number)):
            found.append(math.fsum(known) / len(known))
        elif text is not None:
            found.append(text.total / text.tokens)
    return found

"""The gradient of one optimizer step, over as many micro-batches as the token budget asks for.

The trainer computes a step part by part, with `accumulate_part`, so that
`bounded_step.bounded_gradients` can bound what foreign groups add. `accumulate_gradients` is the
same step at once and without that bound: benchmarks and tests compare with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from services.trainer.gradient.answer_uses import AnswerPlace, AnswerSums, AnswerUse, answer_uses
from services.trainer.gradient.forward import ENTROPIES, CompletionLogprobs, SeparateHead, completion_logprobs, evaluating
from services.trainer.gradient.importance import (
    ImportanceConfig,
    ImportanceWeights,
    behaviour_or,
    foreign_rows,
    importance_weights,
    kept_tokens,
    log_expectations,
    masked_by_objective,
)
from services.trainer.gradient.rows import CompletionRows, RowSlice, TokenGroup, TokenRows, build_rows, micro_batches_of, plan_rows
from services.trainer.objectives.config import ConfiguredObjective, configured_objective
from services.trainer.objectives.token_loss import LossSums, Normaliser, TokenLoss, token_loss, token_weights
from services.trainer.parallel import ALONE, Parallel
from shared.config import NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """Statistics over the completion tokens of the groups that took part; the means are 0 when
    there are none.

    loss: the step's loss. groups, groups_left_out, sequences, tokens: counts. micro_batches,
    padded_tokens: what was computed, prompts and padding included. clip_fraction, dropped_fraction,
    truncated_fraction: shares of tokens whose ratio was clipped, that were rejected, whose
    importance weight was capped. ratio_mean, ratio_max: policy to proximal policy.
    importance_weight_mean: proximal to behaviour, capped. behaviour_fraction: share of tokens with
    behaviour logprobs. kl_behaviour: KL(behaviour || proximal), k3, in nats per token, over those.
    kl_reference: k3, per token. entropy: nats per token.
    """

    loss: float
    groups: int
    groups_left_out: int
    sequences: int
    tokens: int
    micro_batches: int
    padded_tokens: int
    clip_fraction: float
    dropped_fraction: float
    truncated_fraction: float
    ratio_mean: float
    ratio_max: float
    importance_weight_mean: float
    behaviour_fraction: float
    kl_behaviour: float
    kl_reference: float
    entropy: float

    @classmethod
    def nothing(cls) -> UpdateStats:
        return cls.of(LossSums.zero(), groups=0, groups_left_out=0, sequences=0, micro_batches=0, padded_tokens=0)

    @classmethod
    def of(
        cls,
        sums: LossSums,
        *,
        groups: int,
        groups_left_out: int,
        sequences: int,
        micro_batches: int,
        padded_tokens: int,
    ) -> UpdateStats:
        """Means from sums. This is the only place where the host waits for the device."""
        total = sums.to_host()
        tokens, known = max(total.tokens, 1.0), max(total.behaviour_tokens, 1.0)
        return cls(
            loss=total.loss,
            groups=groups,
            groups_left_out=groups_left_out,
            sequences=sequences,
            tokens=int(total.tokens),
            micro_batches=micro_batches,
            padded_tokens=padded_tokens,
            clip_fraction=total.clipped / tokens,
            dropped_fraction=total.dropped / tokens,
            truncated_fraction=total.truncated / tokens,
            ratio_mean=total.ratio / tokens,
            ratio_max=total.ratio_max,
            importance_weight_mean=total.importance_weight / tokens,
            behaviour_fraction=total.behaviour_tokens / tokens,
            kl_behaviour=total.behaviour_kl / known,
            kl_reference=total.reference_kl / tokens,
            entropy=total.entropy / tokens,
        )


BatchLogprobs = list[list[Tensor]]
"""`[group][completion]` -> (tokens,) on the CPU; an empty list for a group that takes no part in
the step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """Rules by which a step's gradient is computed. Only the first four fields change its value.

    temperature: the one the completions were sampled at. count_uninformative: whether groups
    without advantage count in the mean of the loss. False (DAPO's dynamic sampling): such a group
    changes nothing at all. True (plain GRPO): it takes its share of the mean and so makes the step
    smaller. Neither changes with the divergence to the reference, which has a mean of its own.
    budget_tokens: tokens in one forward pass, padding included. packed: texts one after another in
    one row, a group's prompt once; only where `plain_rows_reason(model)` is empty. autocast_bf16:
    bfloat16 matrix products with float32 weights, logprobs and loss. separate_head: how logits are
    computed in chunks, from `separate_head(model, budget_tokens)`; None: all at once.
    """

    objective: ConfiguredObjective = field(default_factory=ConfiguredObjective)
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    temperature: float = 1.0
    count_uninformative: bool = False
    budget_tokens: int = 16_384
    packed: bool = False
    autocast_bf16: bool = False
    separate_head: SeparateHead | None = None

    @classmethod
    def of(cls, config: NodeConfig) -> UpdateConfig:
        """The rules of a node's configuration; fields that depend on the model and the machine keep
        their defaults.
        """
        objective = configured_objective(config)
        return cls(
            objective=objective,
            importance=ImportanceConfig.of(config.trainer),
            temperature=config.generator.temperature,
            count_uninformative=objective.counts_uninformative,
        )

    @property
    def needs_proximal(self) -> bool:
        """Say whether the policy's logprobs at the start of the batch are needed to decide what a
        step drops.
        """
        return self.importance.drops_by_likelihood or self.objective.objective.keeps is not None

    def takes_part(self, group: TokenGroup) -> bool:
        """Say whether the group must be computed, because it can move the policy or the divergence
        to the reference counts.
        """
        return group.moves_policy or (self.objective.needs_reference and group.weight != 0.0 and bool(group.completions))

    def is_scored(self, group: TokenGroup) -> bool:
        """Say whether the group's logprobs at the start of the batch are needed: it takes part, or
        it counts in the mean with what is not dropped for its likelihood.
        """
        return self.takes_part(group) or (self.count_uninformative and self.importance.drops_by_likelihood)


def with_masks(groups: Sequence[TokenGroup], config: UpdateConfig, logprobs: BatchLogprobs | None) -> list[TokenGroup]:
    """`groups` with the tokens marked that the objective gives no loss in an update, given the
    logprobs before it.
    """
    if config.objective.objective.keeps is None or logprobs is None:
        return list(groups)
    numbers = [number for number, group in enumerate(groups) if config.takes_part(group)]
    return masked_by_objective(groups, numbers, logprobs, config.objective)


def step_normaliser(groups: Sequence[TokenGroup], config: UpdateConfig, proximal: BatchLogprobs | None = None) -> Normaliser:
    """The counts that a step over `groups` divides by. Add those of other processes that share the
    step.

    Dropped tokens do not count. Those dropped for their likelihood are known only with `proximal`;
    without it they count.
    """
    total = Normaliser(0, 0, Normaliser(0, 0) if config.objective.needs_reference else None)
    for number, group in enumerate(groups):
        in_loss = config.count_uninformative or group.moves_policy
        in_divergence = config.objective.needs_reference and group.weight != 0.0
        if not (in_loss or in_divergence):
            continue
        group_logprobs = proximal[number] if proximal is not None and proximal[number] else [None] * len(group.completions)
        kept = [kept_tokens(config.importance, group, completion, logprobs) for completion, logprobs in enumerate(group_logprobs)]
        counts = Normaliser.count(kept, group.share)
        total = total + replace(counts if in_loss else Normaliser(0, 0), divergence=counts if in_divergence else None)
    return total


def batch_logprobs(
    model: nn.Module,
    groups: Sequence[TokenGroup],
    config: UpdateConfig,
    parallel: Parallel = ALONE,
    *,
    counted: bool = False,
    known: KnownLogprobs | None = None,
) -> BatchLogprobs:
    """Logprobs of every completion under the current `model`, without gradient; the same in all
    processes. counted: also of groups that take no part but count in the mean
    (`UpdateConfig.is_scored`). known: what these weights were asked before, which is not computed
    again; what is computed is added to it.

    Called at the start of a batch it gives the proximal policy; with a frozen model, the reference.
    """
    known = {} if known is None else known
    scores = config.is_scored if counted else config.takes_part
    unknown: list[TokenGroup] = []
    for group in groups:
        # Of equal answers one is computed: short right answers often are.
        missing = sorted(
            {text: number for number in range(len(group.completions)) if (text := _text(group, number)) not in known}.values()
        )
        if missing and scores(group):
            unknown.append(group if len(missing) == len(group.completions) else group.only(missing))
    for group, logprobs in zip(unknown, _computed_logprobs(model, unknown, config, parallel), strict=True):
        known.update((_text(group, number), each) for number, each in enumerate(logprobs))
    return [[known[_text(group, number)] for number in range(len(group.completions))] if scores(group) else [] for group in groups]


def are_known(groups: Sequence[TokenGroup], known: KnownLogprobs) -> bool:
    """Say whether `batch_logprobs` would compute nothing."""
    return all(_text(group, number) in known for group in groups for number in range(len(group.completions)))


_Text = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]
KnownLogprobs = dict[_Text, Tensor]
"""Logprobs of completions under one state of the weights, by the tokens of prompt and answer and
by which of these the policy sampled: the others have none.
"""


def _text(group: TokenGroup, completion: int) -> _Text:
    return tuple(group.prompt_ids), tuple(group.completions[completion]), tuple(group.sampled_of(completion) or ())


def _computed_logprobs(model: nn.Module, groups: Sequence[TokenGroup], config: UpdateConfig, parallel: Parallel) -> BatchLogprobs:
    mine: dict[AnswerPlace, Tensor] = {}
    for rows, counts in _micro_batches(model, groups, range(len(groups)), config, parallel):
        # Adapters' dropout would make it another policy, a different one at every call.
        with torch.no_grad(), evaluating(model), _autocast(rows, config):
            scored = _completion_logprobs(model, rows, config, entropies=0).logprobs.cpu()
        for row, (group, completion) in enumerate(rows.sequences if counts else []):
            mine[group, completion] = scored[row, : len(groups[group].completions[completion])]
    return _gathered(mine, [group.completion_lengths for group in groups], _exact_dtype(model), parallel)


def _gathered(
    mine: Mapping[AnswerPlace, Tensor], lengths: Sequence[Sequence[int]], dtype: torch.dtype, parallel: Parallel
) -> BatchLogprobs:
    """The logprobs of all processes, for groups whose answers have so many tokens.

    Each completion is computed by one process, so adding the others' zeros changes no bit.
    """
    flat = [
        mine.get((g, c), torch.zeros(length, dtype=dtype))
        for g, group_lengths in enumerate(lengths)
        for c, length in enumerate(group_lengths)
    ]
    if not flat:
        return [[] for _ in lengths]
    all_tokens = iter(torch.split(reduce(add, parallel.gather(torch.cat(flat))), [len(part) for part in flat]))
    return [[next(all_tokens) for _ in group_lengths] for group_lengths in lengths]


def _exact_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which a model's logprobs are computed."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32


class FirstPass:
    """The first update of a batch. The policy has not moved yet, so the logprobs that the update
    computes show which foreign answers are absurd, and are the proximal policy of later updates.

    checked: the groups whose answers take part only if this policy finds them likely enough;
    min_logprob: their least mean logprob per token, in nats. Afterwards `kept` holds the answers of
    each checked group that took part, `groups` all groups with these alone, and `logprobs` theirs,
    the same in all processes.
    """

    def __init__(self, checked: Iterable[int] = (), min_logprob: float = -math.inf) -> None:
        self.checked, self.min_logprob = frozenset(checked), min_logprob
        self.kept: dict[int, list[int]] = {}
        self.groups: list[TokenGroup] = []
        self.logprobs: BatchLogprobs = []
        self._mine: dict[AnswerPlace, Tensor] = {}

    def likely(self, rows: CompletionRows, scored: CompletionLogprobs, groups: Sequence[TokenGroup]) -> list[int]:
        """Note the logprobs of a micro-batch, and choose the rows that take part in the loss."""
        host = scored.logprobs.detach().cpu()
        for row, (group, completion) in enumerate(rows.sequences):
            self._mine[group, completion] = host[row, : len(groups[group].completions[completion])]
        return [
            row
            for row, (group, completion) in enumerate(rows.sequences)
            if group not in self.checked
            or _mean(self._mine[group, completion], groups[group].sampled_lengths[completion]) >= self.min_logprob
        ]

    def gather(self, model: nn.Module, groups: Sequence[TokenGroup], config: UpdateConfig, parallel: Parallel) -> None:
        """Exchange what each process found. A group of which no answer took part stays, without
        answers.
        """
        lengths = [group.completion_lengths if config.takes_part(group) else [] for group in groups]
        found = _gathered(self._mine, lengths, _exact_dtype(model), parallel)
        self.kept = {number: likely_answers(groups[number], found[number], self.min_logprob) for number in sorted(self.checked)}
        self.groups = [group.only(self.kept[number]) if number in self.kept else group for number, group in enumerate(groups)]
        self.logprobs = [[each[place] for place in self.kept.get(number, range(len(each)))] for number, each in enumerate(found)]

    def counted(self, part: GradientPart, factor: float) -> GradientPart:
        """The gradient of the answers that took part, by their new places, where leaving out the
        others makes each count `factor` times as much.
        """
        new = {(number, old): (number, place) for number, kept in self.kept.items() for place, old in enumerate(kept)}
        answers = tuple(replace(each, places=[new.get(place, place) for place in each.places]) for each in part.answers)
        return replace(part.scaled(factor), answers=answers)


def likely_answers(group: TokenGroup, logprobs: Sequence[Tensor], min_logprob: float) -> list[int]:
    """Choose the answers whose mean logprob per sampled token is at least `min_logprob`, which NaN
    is not.
    """
    sampled = enumerate(zip(logprobs, group.sampled_lengths, strict=True))
    return [number for number, (each, length) in sampled if _mean(each, length) >= min_logprob]


def _mean(logprobs: Tensor, sampled_tokens: int) -> float:
    return float(logprobs.sum()) / sampled_tokens  # what an environment said is 0


@dataclass(frozen=True, slots=True)
class GradientPart:
    """A part of a step that was added to the gradient: sums over its tokens and over each
    completion's, and what this process computed for it.
    """

    sums: LossSums
    micro_batches: int = 0
    padded_tokens: int = 0
    answers: tuple[AnswerSums, ...] = ()

    def __add__(self, other: GradientPart) -> GradientPart:
        """Combine two consecutive parts."""
        return GradientPart(
            self.sums + other.sums,
            self.micro_batches + other.micro_batches,
            self.padded_tokens + other.padded_tokens,
            self.answers + other.answers,
        )

    @classmethod
    def nothing(cls, model: nn.Module) -> GradientPart:
        return cls(LossSums.zero(next(model.parameters()).device))

    def scaled(self, scale: float) -> GradientPart:
        """The part of a gradient that is multiplied by `scale`; with 0 only its cost remains."""
        if not scale:
            return replace(self, sums=LossSums.zero(self.sums.loss.device), answers=())
        return replace(self, sums=replace(self.sums, loss=self.sums.loss * scale))  # type: ignore[arg-type]

    def uses(self, groups: Sequence[TokenGroup], config: UpdateConfig, parallel: Parallel = ALONE) -> dict[AnswerPlace, AnswerUse]:
        """Sum up what the gradient used of every completion, over all processes."""
        lengths = {number: group.completion_lengths for number, group in enumerate(groups) if config.takes_part(group)}
        return answer_uses(self.answers, lengths, parallel)

    def stats(self, groups: Sequence[TokenGroup], config: UpdateConfig, parallel: Parallel = ALONE) -> UpdateStats:
        """The statistics of a step over `groups`, over all processes."""
        taking_part = [group for group in groups if config.takes_part(group)]
        computed = reduce(add, parallel.gather(torch.tensor([self.micro_batches, self.padded_tokens]))).tolist()
        return UpdateStats.of(
            reduce(add, map(LossSums.unpack, parallel.gather(self.sums.pack()))),
            groups=len(taking_part),
            groups_left_out=len(groups) - len(taking_part),
            sequences=sum(len(group.completions) for group in taking_part),
            micro_batches=computed[0],
            padded_tokens=computed[1],
        )


def accumulate_gradients(
    model: nn.Module,
    groups: Sequence[TokenGroup],
    config: UpdateConfig,
    *,
    proximal: BatchLogprobs | None = None,
    reference: BatchLogprobs | None = None,
    normaliser: Normaliser | None = None,
    parallel: Parallel = ALONE,
) -> UpdateStats:
    """Add the gradient of one step over `groups` to the parameters' `.grad`, without a bound on
    foreign groups. Does not step the optimizer or clear gradients.

    proximal: from `batch_logprobs` at the start of the batch; None: the current policy, so every
    ratio is 1. reference: from `batch_logprobs` of the reference model; needed if `kl_coefficient`
    is not 0. normaliser: the counts over all processes that share the step; None: those of
    `groups`. parallel: the processes that each compute a share of the same `groups`; the statistics
    are those of all. Groups that take no part are not computed; if none is left, no gradient
    changes.
    """
    if normaliser is None:
        normaliser = step_normaliser(groups, config, proximal)
    part = accumulate_part(
        model,
        groups,
        range(len(groups)),
        config,
        normaliser,
        proximal=proximal,
        reference=reference,
        parallel=parallel,
    )
    return part.stats(groups, config, parallel)


def accumulate_part(
    model: nn.Module,
    groups: Sequence[TokenGroup],
    numbers: Sequence[int],
    config: UpdateConfig,
    normaliser: Normaliser,
    *,
    proximal: BatchLogprobs | None = None,
    reference: BatchLogprobs | None = None,
    parallel: Parallel = ALONE,
    first: FirstPass | None = None,
) -> GradientPart:
    """Like `accumulate_gradients`, but only for the groups at `numbers`; `normaliser` is the whole
    step's. first: says which answers take part, and notes the logprobs.
    """
    part = GradientPart.nothing(model)
    numbers = [number for number in numbers if config.takes_part(groups[number])]
    for rows, counted in _micro_batches(model, groups, numbers, config, parallel):
        with _autocast(rows, config):
            scored = _completion_logprobs(model, rows, config)
        with_loss: CompletionRows = rows
        if first is not None and counted:
            likely = first.likely(rows, scored, groups)
            if len(likely) < len(rows.sequences):
                with_loss = CompletionRows(mask=rows.mask[likely], sequences=[rows.sequences[row] for row in likely])
                scored = CompletionLogprobs(scored.logprobs[likely], scored.entropy[likely])
        part = replace(part, micro_batches=part.micro_batches + 1, padded_tokens=part.padded_tokens + rows.input_ids.numel())
        if not with_loss.sequences:
            # A gradient of 0, because processes that share the weights make their passes together.
            scored.logprobs.sum().backward()  # type: ignore[no-untyped-call]
            continue
        found = scored_loss(groups, with_loss, scored, config, normaliser, proximal, reference)
        (found.loss if counted else 0.0 * found.loss).backward()  # type: ignore[no-untyped-call]
        if counted:
            part = part + GradientPart(found.sums, answers=(found.answers,))
    return part


class ScoredLoss(NamedTuple):
    """The loss of some completions, with gradient; sums over all their tokens, and over each
    one's.
    """

    loss: Tensor
    sums: LossSums
    answers: AnswerSums


def scored_loss(
    groups: Sequence[TokenGroup],
    rows: CompletionRows,
    scored: CompletionLogprobs,
    config: UpdateConfig,
    normaliser: Normaliser,
    proximal: BatchLogprobs | None,
    reference: BatchLogprobs | None,
) -> ScoredLoss:
    """Loss and sums of completions whose logprobs are known: everything of a step except the
    model's forward pass.

    The arguments are those of `accumulate_gradients`; `scored` holds the logprobs of
    `rows.sequences`, with gradient.
    """
    device = rows.mask.device
    dtype = scored.logprobs.dtype
    proximal_logprobs = scored.logprobs.detach() if proximal is None else rows.pad(proximal, dtype)
    behaviour_logprobs = rows.pad([group.behaviour_logprobs for group in groups], dtype)
    correction = importance_weights(
        config.importance,
        proximal_logprobs=proximal_logprobs,
        behaviour_logprobs=behaviour_logprobs,
        has_behaviour=torch.tensor(
            [groups[group].behaviour_logprobs[completion] is not None for group, completion in rows.sequences],
            device=device,
        ),
        mask=rows.mask,
        foreign=foreign_rows(groups, rows.sequences, device),
    )
    objective = config.objective.objective
    per_token = token_loss(
        config.objective,
        logprobs=scored.logprobs,
        proximal_logprobs=proximal_logprobs,
        advantages=torch.tensor([groups[g].advantages[c] for g, c in rows.sequences], dtype=dtype, device=device),
        mask=rows.mask,
        importance_weights=None if objective.uses_behaviour else correction.weights,
        keep=correction.keep,
        masked=_masked(groups, rows),
        reference_logprobs=None if reference is None else rows.pad(reference, dtype),
        behaviour_logprobs=behaviour_or(groups, rows, proximal_logprobs) if objective.uses_behaviour else None,
        log_denominators=log_expectations(groups, rows, dtype) if objective.uses_group_likelihood else None,
    )
    # A mean per sequence does not depend on lengths; there a long group counts for its sequences
    # like any other.
    by_length = config.objective.aggregated_by != "sequence_mean"
    factors = [groups[group].weight * (groups[group].share if by_length else 1.0) for group, _ in rows.sequences]
    of_group = torch.tensor(factors, dtype=torch.float64, device=device).unsqueeze(1)
    pulls = torch.tensor([groups[group].moves_policy for group, _ in rows.sequences], device=device).unsqueeze(1)
    loss = (token_weights(config.objective, correction.keep, normaliser) * of_group * pulls * per_token.loss).sum()
    if normaliser.divergence is not None:
        weights = token_weights(config.objective, correction.keep, normaliser.divergence) * of_group
        loss = loss + config.objective.settings.kl_coefficient * (weights * per_token.reference_kl).sum()
    weighted = not objective.uses_behaviour
    log_ratio = proximal_logprobs - behaviour_logprobs
    answers = AnswerSums.of(rows.sequences, rows.mask, correction, per_token, log_ratio, weighted=weighted)
    return ScoredLoss(loss, _sums(loss, per_token, correction, scored.entropy, rows.mask), answers)


def _masked(groups: Sequence[TokenGroup], rows: CompletionRows) -> Tensor | None:
    if not any(groups[group].masked for group, _ in rows.sequences):
        return None
    return rows.pad([group.masked or [None] * len(group.completions) for group in groups]) > 0


def _sums(loss: Tensor, per_token: TokenLoss, correction: ImportanceWeights, entropy: Tensor, mask: Tensor) -> LossSums:
    """Sums instead of means: micro-batches and processes are added up before anything is divided,
    so that splitting a step changes no statistic. In float64, because many small numbers are added.
    `mask` and all but `loss` are (rows, tokens).
    """

    def total(values: Tensor) -> Tensor:
        return values.detach().sum(dtype=torch.float64)

    return LossSums(
        loss=total(loss),
        tokens=total(mask),
        dropped=total(mask & ~correction.keep),
        clipped=total(per_token.clipped),
        ratio=total(per_token.ratio),
        ratio_max=per_token.ratio.max().to(torch.float64),
        reference_kl=total(per_token.reference_kl),
        entropy=_estimated_sum(entropy, mask),
        importance_weight=total(correction.weights),
        behaviour_tokens=total(correction.known),
        behaviour_kl=total(correction.behaviour_kl),
        truncated=total(correction.truncated),
    )


def _estimated_sum(entropy: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens of `mask`, from those whose entropy is known; the others are NaN."""
    known = mask & ~entropy.isnan()
    mean = entropy.where(known, 0.0).sum(dtype=torch.float64) / known.sum().clamp(min=1)
    return mean * mask.sum()


def _micro_batches(
    model: nn.Module, groups: Sequence[TokenGroup], numbers: Sequence[int], config: UpdateConfig, parallel: Parallel
) -> Iterator[tuple[TokenRows, bool]]:
    """This process's rows of the groups at `numbers`, one micro-batch at a time, on the model's
    device; and whether they count.
    """
    device = next(model.parameters()).device
    chosen = [groups[number] for number in numbers]
    # No slice is so wide that a process would wait for the one that computes it.
    tokens = sum(len(group.prompt_ids) + sum(group.completion_lengths) for group in chosen)
    widest = min(config.budget_tokens, -(-tokens // parallel.ranks))
    planned = plan_rows(chosen, packed=config.packed, budget_tokens=widest)
    rows = [RowSlice(row.width, numbers[row.group], row.start, row.stop) for row in planned]
    for batch in micro_batches_of(parallel.rank, parallel.ranks, rows, config.budget_tokens, packed=config.packed):
        yield build_rows(groups, batch.rows, packed=config.packed).to(device), batch.counted


def _completion_logprobs(model: nn.Module, rows: TokenRows, config: UpdateConfig, entropies: int = ENTROPIES) -> CompletionLogprobs:
    return completion_logprobs(model, rows, temperature=config.temperature, separate_head=config.separate_head, entropies=entropies)


def _autocast(rows: TokenRows, config: UpdateConfig) -> torch.autocast:
    return torch.autocast(rows.mask.device.type, dtype=torch.bfloat16, enabled=config.autocast_bf16)

"""What is known about the policies that sampled a step's completions, as tensors, and which tokens
a step keeps because of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.trainer.gradient.foreign_weights import ForeignRows
from services.trainer.gradient.importance import ImportanceConfig, importance_weights
from services.trainer.gradient.rows import CompletionRows, TokenGroup
from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.gepo import gepo_log_expectation


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
    """How many tokens of completion `number` `importance_weights` keeps.

    proximal_logprobs: (tokens,). Without them, tokens that would be dropped for their likelihood
    count as kept.
    """
    behaviour, tokens = group.behaviour_logprobs[number], len(group.completions[number])
    if proximal_logprobs is None or not config.drops_by_likelihood:
        return tokens if behaviour is None else sum(map(math.isfinite, behaviour))
    correction = importance_weights(
        config,
        proximal_logprobs=proximal_logprobs.unsqueeze(0),
        behaviour_logprobs=torch.tensor([list(behaviour or [0.0] * tokens)], dtype=proximal_logprobs.dtype),
        has_behaviour=torch.tensor([behaviour is not None]),
        mask=torch.ones(1, tokens, dtype=torch.bool),
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
    keep = keeps(torch.cat(current) - torch.cat(behaviours), torch.cat(advantages), configured.settings)
    masked = [(~part).to(torch.float64).tolist() for part in torch.split(keep, [len(each) for each in current])]
    of_group: dict[int, list[list[float]]] = {}
    for (group, _), each in zip(places, masked, strict=True):
        of_group.setdefault(group, []).append(each)
    return [replace(group, masked=of_group.get(index, ())) for index, group in enumerate(groups)]


def _mean_logprobs(group: TokenGroup) -> list[float]:
    """Mean logprob per token of each completion whose sender's logprobs are known."""
    found = []
    for number, behaviour in enumerate(group.behaviour_logprobs):
        text = group.text_logprob(number)
        if behaviour is not None and (known := [each for each in behaviour if math.isfinite(each)]):
            found.append(math.fsum(known) / len(known))
        elif text is not None:
            found.append(text.total / text.tokens)
    return found

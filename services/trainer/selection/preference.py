"""Chooses which foreign groups a step keeps when it gets more than it uses: the likeliest, or the
least likely, under this node's policy.

The sampler has no model. If its strategy depends on likelihood, it sends more candidates than J and
says how many to keep (`Batch.preference`). The choice is made here, where the model computes the
text anyway. The same batch and weights give the same choice on a CPU, so a resumed trainer trains
on the same groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from torch import nn

from services.trainer.gradient.update import BatchLogprobs, UpdateConfig, batch_logprobs
from services.trainer.parallel.protocol import ALONE, Parallel
from services.trainer.selection.tokens import Intake, IntakeRules, take_in
from shared.contracts.messages import Batch, Preference


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferred:
    """The batch with only the chosen foreign groups, and figures of the choice.

    left_out: candidates that are not trained on. logprob, logprob_left_out: mean logprob per token,
    in nats, of the text of the chosen groups and of the others; None without such groups.
    """

    batch: Batch
    left_out: int = 0
    logprob: float | None = None
    logprob_left_out: float | None = None


def prefer(model: nn.Module, batch: Batch, rules: IntakeRules, config: UpdateConfig, parallel: Parallel = ALONE) -> Preferred:
    """Choose among the batch's foreign groups by its `preference`, under `model` in its current
    state.

    A candidate that cannot be trained on, or whose likelihood is not a number, comes last.
    """
    taken = candidates_of(batch, rules)
    if taken is None:
        return Preferred(batch=batch)
    return prefer_by(batch, taken, batch_logprobs(model, taken.groups, config, parallel))


def candidates_of(batch: Batch, rules: IntakeRules) -> Intake | None:
    """The foreign groups that `prefer` chooses from; None if there is nothing to choose."""
    candidates = [item for item in batch.items if item.scored.origin == "external"]
    if batch.preference is None or not candidates:
        return None
    return take_in(replace(batch, items=candidates), rules)


def prefer_by(batch: Batch, taken: Intake, logprobs: BatchLogprobs) -> Preferred:
    """The result of `prefer`, given this node's own `logprobs` of the groups in `taken`, the
    batch's `candidates_of`.
    """
    preference = batch.preference
    assert preference is not None
    candidates = [item for item in batch.items if item.scored.origin == "external"]
    mean_of = {
        group_id: math.fsum(float(answer_logprobs.sum()) for answer_logprobs in group_logprobs) / sum(map(len, group_logprobs))
        for (_, group_id), group_logprobs in zip(taken.authors, logprobs, strict=True)
        if group_logprobs
    }
    means = [mean_of.get(item.scored.group_id, math.nan) for item in candidates]
    chosen = preferred_indices(means, [item.scored.share or item.scored.group.node for item in candidates], preference)
    kept = {candidates[index].scored.group_id for index in chosen}
    return Preferred(
        batch=replace(batch, items=[item for item in batch.items if item.scored.origin == "local" or item.scored.group_id in kept]),
        left_out=len(candidates) - len(chosen),
        logprob=_mean([means[index] for index in chosen]),
        logprob_left_out=_mean([mean for index, mean in enumerate(means) if index not in set(chosen)]),
    )


def preferred_indices(means: Sequence[float], nodes: Sequence[str], preference: Preference) -> list[int]:
    """Indexes of the candidates to keep, in order.

    means: mean logprob per token of each candidate's text. nodes: the share of the batch that each
    counts against.
    """
    sign = -1.0 if preference.by == "near" else 1.0
    last = math.inf
    order = sorted(range(len(means)), key=lambda index: sign * means[index] if math.isfinite(means[index]) else last)
    chosen: list[int] = []
    taken: Counter[str] = Counter()
    new = frozenset(preference.newcomers)
    room_for_new = math.inf if preference.newcomers_most is None else preference.newcomers_most
    for index in order:
        node = nodes[index]
        if len(chosen) == preference.keep or taken[node] == preference.node_cap or (node in new and room_for_new <= 0):
            continue
        room_for_new -= node in new
        taken[node] += 1
        chosen.append(index)
    return sorted(chosen)


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None

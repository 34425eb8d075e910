"""Checks foreign answers under this node's policy: answers that are far too unlikely are not
trained on.

A verifier judges the answer at the end, not the text that leads to it, so a node can wrap a right
answer in poisoned reasoning. The mean log-probability under this node's policy distinguishes such
text from text that the policy might have produced (arXiv 2511.09780). How likely a policy finds its
own text differs from model to model; how much less likely it finds other nodes' text hardly does.
So the bound is relative to the mean of the same batch's local answers, and needs neither tuning for
a model nor memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import BatchLogprobs, UpdateConfig, batch_logprobs
from services.trainer.parallel.protocol import ALONE, Parallel
from services.trainer.selection.tokens import Intake
from shared.config.sections import TrainerSection
from shared.seeds import number_from


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPolicyRules:
    """fraction: part of the foreign groups that is checked. min_logprob: smallest mean logprob per
    token, in nats.

    slack: how many nats per token a foreign answer may be below the mean of the batch's local
    answers; None: only `min_logprob` applies.
    """

    fraction: float
    min_logprob: float
    slack: float | None = None

    @classmethod
    def of(cls, trainer: TrainerSection) -> OwnPolicyRules:
        """The rules of a node's configuration."""
        return cls(
            fraction=trainer.policy_check_fraction,
            min_logprob=trainer.min_foreign_logprob,
            slack=trainer.foreign_logprob_slack,
        )


def drop_absurd(
    model: nn.Module, intake: Intake, config: UpdateConfig, rules: OwnPolicyRules, batch_seed: int, parallel: Parallel = ALONE
) -> tuple[Intake, Counter[str]]:
    """The intake without the foreign answers that are absurd under `model` in its current state,
    and their number by node.

    A dropped answer still counts in its group's baseline. A group without any answers left is
    skipped as `absurd`. The same batch and weights give the same result on a CPU: the batch's seed
    and the group's id determine which groups are checked, and a sender cannot know the batch in
    advance.
    """
    looked_at = groups_to_check(intake, config, rules, batch_seed)
    if not looked_at:
        return intake, Counter()
    logprobs = batch_logprobs(model, [intake.groups[index] for index in looked_at], config, parallel)
    return without_absurd(intake, looked_at, logprobs, rules)


def groups_to_check(intake: Intake, config: UpdateConfig, rules: OwnPolicyRules, batch_seed: int) -> list[int]:
    """Indexes in `intake.groups` of the foreign groups that are checked."""
    return [
        index
        for index, (group, (_, group_id)) in enumerate(zip(intake.groups, intake.authors, strict=True))
        if not group.is_local and config.takes_part(group) and _chance(batch_seed, group_id) < rules.fraction
    ]


def least_logprob(local_means: Sequence[float], rules: OwnPolicyRules) -> float:
    """The smallest allowed mean logprob per token of a foreign answer, given those of the batch's
    local answers when they were sampled.

    Without local answers there is nothing to compare with, and only `min_logprob` applies.
    """
    known = [mean for mean in local_means if math.isfinite(mean)]
    if rules.slack is None or not known:
        return rules.min_logprob
    return max(rules.min_logprob, math.fsum(known) / len(known) - rules.slack)


def local_means(groups: Sequence[TokenGroup]) -> list[float]:
    """Mean logprob per token of every local answer whose logprobs are known, under the policy that
    sampled it.

    Replayed answers are left out: an older policy gave its own text a lower likelihood, which would
    lower the bound for foreign text.
    """
    return [
        math.fsum(logprobs) / len(logprobs)
        for group in groups
        if group.is_local and not group.replayed
        for logprobs in group.behaviour_logprobs
        if logprobs
    ]


def without_absurd(
    intake: Intake, looked_at: Sequence[int], logprobs: BatchLogprobs, rules: OwnPolicyRules
) -> tuple[Intake, Counter[str]]:
    """The result of `drop_absurd`, given this node's own `logprobs` of the groups at
    `looked_at`.
    """
    dropped: Counter[str] = Counter()
    least = least_logprob(local_means(intake.groups), rules)
    groups: list[TokenGroup | None] = list(intake.groups)
    skipped_of, dropped_of = dict(intake.skipped_of), dict(intake.dropped_of)
    for index, of_group in zip(looked_at, logprobs, strict=True):
        # A mean that is NaN must not admit the text.
        kept = [number for number, of_tokens in enumerate(of_group) if float(of_tokens.mean()) >= least]
        if len(kept) < len(of_group):
            node, group_id = intake.authors[index]
            dropped[node] += len(of_group) - len(kept)
            places = zip(intake.groups[index].places, intake.groups[index].advantages, strict=False)
            without = {place: ("absurd", advantage) for number, (place, advantage) in enumerate(places) if number not in kept}
            groups[index] = intake.groups[index].only(kept) if kept else None
            if kept:
                dropped_of[group_id] = dropped_of.get(group_id, {}) | without
            else:
                skipped_of[group_id] = "absurd"
    left = [(group, author) for group, author in zip(groups, intake.authors, strict=True) if group is not None]
    gone = len(groups) - len(left)
    return (
        replace(
            intake,
            groups=[group for group, _ in left],
            authors=[author for _, author in left],
            external=intake.external - gone,
            skipped=intake.skipped + Counter({"absurd": gone}),
            skipped_of=skipped_of,
            dropped_of=dropped_of,
        ),
        dropped,
    )


def _chance(batch_seed: int, group_id: str) -> float:
    return number_from(f"own-policy {batch_seed} {group_id}") / 2**64

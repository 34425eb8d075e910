"""Makes the record of one node's round. Rewards are kept apart by origin and by what they were
given for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from lab.sim_node import LocalGroup, SimNode
from lab.stacked_learner import StepOutcome
from shared.contracts.messages import Batch
from shared.rewards import is_informative


def step_record(
    number: int,
    node: SimNode,
    own: Sequence[LocalGroup],
    batch: Batch | None,
    outcome: StepOutcome | None,
    refused: Counter[str],
    now_s: float,
    round_s: float,
    hostile: Collection[str] = (),
) -> dict[str, Any]:
    """The fields of a `step` line.

    trained_reward: metric (a), the mean reward of every completion in the batch, zero advantage
    included. local_reward: metric (b), the mean reward of all completions that the node sampled
    this round, whether used or not. staleness: optimizer steps, mean over local groups.
    external_age_rounds: rounds since foreign groups were made, mean. groups_hostile: the foreign
    groups trained on that have a name in `hostile`. *_replayed, replayed_reward: figures of
    replayed groups (`sampler.replay`), if there are any; no figure of local groups includes them.
    capability: the factor on foreign advantages, by node, for nodes about which enough is known.
    """
    fresh = [reward for group in own for reward in group.rewards]
    record: dict[str, Any] = {
        "round": number,
        "node": node.name,
        "local_reward": _mean(fresh),
        "generated": len(fresh),
        "made_informative": sum(group.informative for group in own),
        "made": len(own),
        "tasks": _by_dataset(own),
    }
    if refused:
        record["refused"] = dict(sorted(refused.items()))
    if batch is None or outcome is None:
        return record | {"trained_reward": None, "updated": False}
    intake = outcome.intake
    trained = [*intake.rewards_local, *intake.rewards_external, *intake.rewards_replayed]
    local = [item for item in batch.items if item.scored.origin == "local" and not item.replayed]
    external = [item for item in batch.items if item.scored.origin == "external"]
    record |= {
        "trained_reward": _mean(trained),
        "external_reward": _mean(intake.rewards_external),
        "groups_local": intake.local,
        "groups_external": intake.external,
        "informative_local": sum(is_informative(item.scored.rewards) for item in local),
        "informative_external": sum(is_informative(item.scored.rewards) for item in external),
        "pool_external": batch.pool_external,
        "shortage": batch.shortage,
        "strategy": batch.strategy,
        "staleness": _mean([float(item.staleness) for item in local if item.staleness is not None]),
        "external_age_rounds": _mean([item.age_s / round_s for item in external]),
        "tokens": sum(sum(group.completion_lengths) for group in intake.groups),
        "updated": outcome.moved,
    }
    if intake.replayed:
        again = [item for item in batch.items if item.replayed]
        record |= {
            "groups_replayed": intake.replayed,
            "replayed_reward": _mean(intake.rewards_replayed),
            "informative_replayed": sum(is_informative(item.scored.rewards) for item in again),
        }
    if hostile:
        record["groups_hostile"] = sum(author in hostile for author, _ in intake.authors)
    if outcome.absurd:
        record["absurd"] = outcome.absurd
    if outcome.bounded:
        record["bounded"] = outcome.bounded
    if intake.capability_of:
        record["capability"] = dict(sorted(intake.capability_of.items()))
    if intake.skipped:
        record["skipped"] = dict(sorted(intake.skipped.items()))
    if not outcome.stats:
        return record

    def mean(name: str) -> float:
        return sum(float(getattr(stats, name)) for stats in outcome.stats) / len(outcome.stats)

    return record | {
        "loss": mean("loss"),
        "grad_norm": _mean(outcome.grad_norms),
        "entropy": mean("entropy"),
        "clip_fraction": mean("clip_fraction"),
        "ratio_mean": mean("ratio_mean"),
        "ratio_max": max(stats.ratio_max for stats in outcome.stats),
        "importance_weight": mean("importance_weight_mean"),
        "truncated_fraction": mean("truncated_fraction"),
        "kl_behaviour": mean("kl_behaviour"),
        "kl_reference": mean("kl_reference"),
    }


def _by_dataset(own: Sequence[LocalGroup]) -> dict[str, list[float]]:
    """Number of completions sampled and their mean reward, by dataset."""
    rewards: dict[str, list[float]] = {}
    for group in own:
        rewards.setdefault(group.group.task.ref.dataset, []).extend(group.rewards)
    return {name: [len(task_rewards), sum(task_rewards) / len(task_rewards)] for name, task_rewards in sorted(rewards.items())}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

"""Makes the `step` records of a simulated node.

What a trainer did is one line of its `metrics.jsonl` (`services.trainer.records.StepRecord`). A
simulation knows more: every fresh answer, refusals by reason, and who is hostile. Replayed groups
(`sampler.replay`) count in the earlier batch that they were generated for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lab.sim_node import LocalGroup, SimNode
from services.trainer.records import NO_ADVANTAGE, TRAINED
from shared.contracts.messages import Batch
from shared.rewards import is_informative

_COPIED = (
    *("updated", "loss", "grad_norm", "entropy", "clip_fraction", "importance_weight", "truncated_fraction"),
    *("kl_behaviour", "kl_reference", "groups_local", "groups_external", "tokens"),
)


def trained_part(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a trainer knows, from a line of its metrics.

    trained_reward: metric (a), the mean reward of every completion in the batch, zero advantage
    included; a trainer gives means by origin, so they are weighted by their numbers of groups.
    staleness: optimizer steps, mean over local groups. *_replayed, replayed_reward: figures of
    replayed groups, if there are any; no figure of local groups includes them.
    """
    replayed, replayed_reward = line.get("groups_replayed", 0), line.get("reward_replayed")
    parts = [
        (line["groups_local"], line["reward_local"]),
        (line["groups_external"], line["reward_external"]),
        (replayed, replayed_reward),
    ]
    known = [(groups, reward) for groups, reward in parts if groups and reward is not None]
    total = sum(groups for groups, _ in known)
    rare = {
        "absurd": "answers_absurd",
        "bounded": "groups_bounded",
        "mastered": "mastered_of",
        "skipped": "skipped",
    }
    return {
        "trained_reward": sum(groups * reward for groups, reward in known) / total if total else None,
        "external_reward": line["reward_external"],
        "staleness": line["staleness_mean"],
        "ratio_mean": line["importance_ratio"],
        "ratio_max": line["importance_ratio_max"],
        **{name: line[name] for name in _COPIED},
        **({"groups_replayed": replayed, "replayed_reward": replayed_reward} if replayed else {}),
        **{name: found for name, key in rare.items() if (found := line.get(key))},
    }


def simulated_part(
    node: SimNode,
    own: Sequence[LocalGroup],
    batch: Batch | None,
    refused: Counter[str],
    round_s: float,
    hostile: Collection[str] = (),
) -> dict[str, Any]:
    """The fields that only a simulation knows.

    local_reward: metric (b), the mean reward of all completions that the node sampled this round.
    external_age_rounds: rounds since foreign groups were made, mean. groups_hostile: the foreign
    groups trained on that have a name in `hostile`.
    """
    fresh = [reward for group in own for reward in group.rewards]
    record: dict[str, Any] = {
        "local_reward": _mean(fresh),
        "generated": len(fresh),
        "made_informative": sum(group.informative for group in own),
        "made": len(own),
        "tasks": _by_dataset(own),
    }
    if refused:
        record["refused"] = dict(sorted(refused.items()))
    if batch is None:
        return record | {"trained_reward": None, "updated": False}
    fates = {group["id"]: group["fate"] for group in node.policy.learner.trained}
    taken = [item for item in batch.items if fates[item.scored.group_id] in {TRAINED, NO_ADVANTAGE}]
    local = [item for item in batch.items if item.scored.origin == "local" and not item.replayed]
    external = [item for item in taken if item.scored.origin == "external"]
    record |= {
        "informative_local": sum(is_informative(item.scored.rewards) for item in local),
        "informative_external": sum(is_informative(item.scored.rewards) for item in external),
        "pool_external": batch.pool_external,
        "shortage": batch.shortage,
        "strategy": batch.strategy,
        "external_age_rounds": _mean([item.age_s / round_s for item in external]),
    }
    if again := [item for item in taken if item.replayed]:
        record["informative_replayed"] = sum(is_informative(item.scored.rewards) for item in again)
    if hostile:
        record["groups_hostile"] = sum(item.scored.group.node in hostile for item in external)
    return record


def _by_dataset(own: Sequence[LocalGroup]) -> dict[str, list[float]]:
    """Number of completions sampled and their mean reward, by dataset."""
    rewards: dict[str, list[float]] = {}
    for group in own:
        rewards.setdefault(group.group.task.ref.dataset, []).extend(group.rewards)
    return {name: [len(task_rewards), sum(task_rewards) / len(task_rewards)] for name, task_rewards in sorted(rewards.items())}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

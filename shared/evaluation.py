"""The definition of a pass, and the summary of a held-out evaluation. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.control import EvalReport, TaskScore

PASS_REWARD = 0.99
"""An answer passes at this reward or above; partial credit is not a pass."""


def summarise(
    results: Iterable[tuple[str, float]],
    *,
    node: str,
    policy_version: int,
    created_at: float,
    seconds: float,
    held_out: str | None = None,
) -> EvalReport:
    """Sum up `(dataset, reward)` pairs, one per answer. `held_out`: the id of the set of tasks.

    Raises:
        ValueError: no results.
    """
    by_dataset: dict[str, list[float]] = {}
    for dataset, reward in results:
        by_dataset.setdefault(dataset, []).append(reward)
    everything = [reward for rewards in by_dataset.values() for reward in rewards]
    if not everything:
        raise ValueError("an evaluation needs at least one answer")
    overall = _score(everything)
    return EvalReport(
        node=node,
        policy_version=policy_version,
        created_at=created_at,
        n=overall.n,
        pass_rate=overall.pass_rate,
        mean_reward=overall.mean_reward,
        per_task={dataset: _score(rewards) for dataset, rewards in sorted(by_dataset.items())},
        seconds=seconds,
        held_out=held_out,
    )


def _score(rewards: list[float]) -> TaskScore:
    return TaskScore(
        n=len(rewards),
        pass_rate=sum(reward >= PASS_REWARD for reward in rewards) / len(rewards),
        mean_reward=sum(rewards) / len(rewards),
    )

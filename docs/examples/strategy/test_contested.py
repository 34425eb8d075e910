"""`pytest test_contested.py`, in the environment that the example is installed in."""

from __future__ import annotations

import random

from swarm_example_strategy import STRATEGY

from services.sampler.pool import Knowledge, PoolEntry


def entry(seq: int, mean_reward: float) -> PoolEntry:
    return PoolEntry(
        seq=seq,
        group_id=str(seq),
        origin="external",
        node=f"node {seq}",
        dataset="gcd",
        source="gcd",
        draw=seq,
        policy_version=0,
        created_at=0.0,
        received_at=0.0,
        mean_reward=mean_reward,
        informative=True,
        reward_std=0.5,
        has_pass=True,
        completions=8,
        token_count=80,
    )


def test_of_two_groups_the_contested_one_is_drawn_most() -> None:
    entries = [entry(1, 0.5), entry(2, 0.98)]
    drawn = [STRATEGY.draw(entries, 1, 1, random.Random(seed), Knowledge())[0].seq for seed in range(200)]
    assert drawn.count(1) > 160
    assert drawn == [STRATEGY.draw(entries, 1, 1, random.Random(seed), Knowledge())[0].seq for seed in range(200)]

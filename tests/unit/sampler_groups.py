"""Scored groups for the sampler's tests, small and complete."""

from __future__ import annotations

from shared.contracts.codec import content_id, encode
from shared.contracts.messages import Completion, RolloutGroup, Sampling, ScoredGroup, TaskRef
from shared.contracts.wire import ModelIdentity
from shared.tasks.evaluation import PASS_REWARD
from shared.tasks.prompt import text_task


def scored_group(
    draw: int,
    *,
    node: str = "alpha",
    origin: str = "local",
    version: int = 0,
    rewards: tuple[float, ...] = (0.0, 1.0),
    created_at: float = 1000.0,
    failure: str | None = None,
    text_chars: int = 3,
    dataset: str = "chain_sum",
) -> ScoredGroup:
    """A group with an id of its own for every node and draw; `failure` empties its rewards."""
    group = RolloutGroup(
        node=node,
        created_at=created_at,
        draw=draw,
        task=text_task(TaskRef(dataset=dataset, seed=draw, index=0), "1+1", "2"),
        completions=[Completion(text="x" * text_chars, finish_reason="stop", token_count=2) for _ in rewards],
        model=ModelIdentity(name="tiny", tokenizer_hash="0" * 64),
        policy_version=version,
        sampling=Sampling(),
    )
    return ScoredGroup(
        group_id=content_id(encode(group)),
        origin="local" if origin == "local" else "external",
        group=group,
        rewards=[] if failure else list(rewards),
        passed=None if failure else [reward >= PASS_REWARD for reward in rewards],
        scored_by="test",
        score_seconds=0.0,
        scored_at=created_at,
        failure=failure,
    )

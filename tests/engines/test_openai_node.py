"""A node whose policy is served elsewhere and trains nowhere: it only generates, and nobody's
training paces it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.contracts.codec import decode
from shared.contracts.messages import RolloutGroup
from shared.contracts.subjects import node_rollouts_stream
from tests.engines.conftest import CONTEXT_LENGTH, Run, Subject, needs_vllm
from tests.engines.served_node import served_node

PACED = 2
"""Groups at which a trainer's pace would end: (0 + 0 + 1) * 2."""


@pytest.mark.parametrize("started", [pytest.param("openai-tied", marks=needs_vllm)], indirect=True)
def test_a_policy_served_elsewhere_makes_groups_without_any_trainer(
    started: Subject, run: Run, nats_url: str, tmp_path: Path
) -> None:
    base_url, folder = started.base_url, started.folder
    assert base_url is not None
    settings = {
        "SWARM_MODEL__MAX_LENGTH": str(CONTEXT_LENGTH),
        "SWARM_GENERATOR__MAX_NEW_TOKENS": "4",
        "SWARM_SAMPLER__MAX_STALENESS": "0",
    }

    async def first_groups() -> list[RolloutGroup]:
        async with served_node(nats_url, folder, base_url, tmp_path, **settings) as node:

            async def enough() -> bool:
                return await node.groups() >= 3 * PACED

            await node.until(enough)
            stored = await node.transport.read(node_rollouts_stream(node.name), 1, 8)
            return [decode(await node.transport.payload(message), RolloutGroup) for message in stored]

    groups = run(first_groups())
    assert sorted(group.draw for group in groups) == list(range(len(groups)))
    assert all(group.policy_version == 0 and len(group.completions) == 2 for group in groups)

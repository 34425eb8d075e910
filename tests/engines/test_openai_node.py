"""A node whose policy is served elsewhere and trains nowhere: it only generates, and nobody's
training paces it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from pathlib import Path

import pytest

from shared.contracts.codec import decode
from shared.contracts.messages import RolloutGroup
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_rollouts_stream
from shared.transport.connect import connect
from tests.engines.conftest import CONTEXT_LENGTH, Run, Subject, needs_vllm
from tests.forked import SERVER, Forked

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("started", [pytest.param("openai-tied", marks=needs_vllm)], indirect=True)
def test_a_policy_served_elsewhere_makes_groups_without_any_trainer(
    started: Subject, run: Run, nats_url: str, tmp_path: Path
) -> None:
    assert started.base_url is not None
    node = f"served-{uuid.uuid4().hex[:8]}"
    config = tmp_path / "node.toml"
    config.write_text('[[tasks]]\ndataset = "gcd"\nconfig = { min_numbers = 2, max_numbers = 2, max_value = 20 }\n')
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SWARM_")},
        **SERVER,
        "SWARM_NODE__ID": node,
        "SWARM_NODE__VAR_DIR": str(tmp_path / "var"),
        "SWARM_NATS__NODE_URL": nats_url,
        "SWARM_NATS__SWARM_URL": "none",
        "SWARM_HTTP__BASE_PORT": "0",
        "SWARM_MODEL__PATH": str(started.folder),
        "SWARM_MODEL__MAX_LENGTH": str(CONTEXT_LENGTH),
        "SWARM_GENERATOR__ENGINE": "openai",
        "SWARM_GENERATOR__OPENAI_URL": started.base_url,
        "SWARM_GENERATOR__COMPLETIONS": "2",
        "SWARM_GENERATOR__GROUPS_PER_CALL": "2",
        "SWARM_GENERATOR__MAX_NEW_TOKENS": "4",
        "SWARM_EVAL__TASKS": "0",
        "SWARM_SAMPLER__LOCAL": "2",
        "SWARM_SAMPLER__EXTERNAL": "0",
        "SWARM_SAMPLER__MAX_STALENESS": "0",
    }
    log = tmp_path / "generator.log"
    generator = Forked("services.generator", ["--config", str(config)], environment=environment, cwd=REPO, log=log)

    async def first_groups() -> list[RolloutGroup]:
        transport = await connect(nats_url, name="test")
        await ensure_node_streams(transport, node)
        deadline = time.monotonic() + 90.0
        # A trainer's pace would end at (0 + 0 + 1) * 2 groups.
        while not (stored := await transport.read(node_rollouts_stream(node), 1, 8)) or len(stored) < 6:
            assert generator.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            await asyncio.sleep(0.2)
        groups = [decode(await transport.payload(message), RolloutGroup) for message in stored]
        await transport.close()
        return groups

    try:
        groups = run(first_groups())
    finally:
        generator.send_signal(signal.SIGTERM)
        code = generator.wait(20)
    assert code == 0, log.read_text()[-3000:]
    assert sorted(group.draw for group in groups) == list(range(len(groups)))
    assert all(group.policy_version == 0 and len(group.completions) == 2 for group in groups)

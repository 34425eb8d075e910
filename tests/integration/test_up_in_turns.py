"""Generators and trainers of two nodes that use one device in turns: real processes, the whole
way.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from shared.device_turns import DeviceTurns, turns_file
from swarm_cli.observe.evaluations import read_steps
from swarm_cli.shipped import DEMO_CONFIG
from tests.e2e.processes import REPO, NodeProcesses, wait_until
from tests.integration.local_swarm import START_TIMEOUT_S, Swarm

pytestmark = pytest.mark.slow


def test_two_nodes_train_to_the_end_and_all_four_have_turns(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, SWARM_MODEL__DEVICE_TURNS="true")
    process = swarm.up("--steps", "3")
    holders: set[str] = set()
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        for file in (tmp_path / "var").glob("device-*.turns"):
            holders |= {match[0] for match in re.finditer(r"\w+ of \w+", file.read_text())}
        time.sleep(0.002)
    if process.poll() is None:
        process.kill()
    out, err = process.communicate(timeout=180)

    assert process.returncode == 0, f"{out[-4000:]}\n{err[-2000:]}"
    assert holders == {"generator of alpha", "generator of beta", "trainer of alpha", "trainer of beta"}
    assert len(read_steps(swarm.node_dir("alpha"))) == len(read_steps(swarm.node_dir("beta"))) == 3


async def test_a_generator_that_waits_for_its_first_turn_ends_when_asked(tmp_path: Path, nats_url: str) -> None:
    """In order and within its grace period, although it holds no model yet."""
    (tmp_path / "var").mkdir()
    environment = {"SWARM_MODEL__DEVICE_TURNS": "true", "SWARM_MODEL__PATH": str(REPO / "models" / "base")}
    environment |= {"SWARM_NATS__NODE_URL": nats_url, "SWARM_NATS__SWARM_URL": nats_url}
    node = NodeProcesses("waits-for-its-turn", "first", tmp_path / "var", environment, DEMO_CONFIG)
    file = turns_file(tmp_path / "var", "auto")
    async with DeviceTurns(file, "somebody else").turn():
        node.start("generator")
        try:
            turns = DeviceTurns(file, "a look")
            await asyncio.to_thread(wait_until, turns.wanted, node, timeout_s=START_TIMEOUT_S, what="the generator waits")
            assert await asyncio.to_thread(node.stop, "generator") == 0, node.log("generator")[-2000:]
        finally:
            node.kill_all()

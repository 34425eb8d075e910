"""Generators and trainers of two nodes that use one device in turns: real processes, the whole
way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.device_turns import DeviceTurns, turns_file
from swarm_cli.installation import DEMO_CONFIG
from tests.e2e.processes import REPO, NodeProcesses, wait_until
from tests.integration.local_swarm import START_TIMEOUT_S
from tests.nats_server import NatsServer

pytestmark = pytest.mark.slow


def test_two_nodes_train_to_the_end_and_all_four_have_turns(tmp_path: Path, nats_server: Callable[[], NatsServer]) -> None:
    environment = {
        "SWARM_MODEL__DEVICE_TURNS": "true",
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
        "SWARM_NATS__NODE_URL": (url := nats_server().url),
        "SWARM_NATS__SWARM_URL": url,
        "SWARM_TRAINER__MAX_STEPS": "3",
        "SWARM_EVAL__TASKS": "8",
    }
    var_dir = tmp_path / "var"
    nodes = [NodeProcesses(name, "first", var_dir, environment, DEMO_CONFIG).start() for name in ("alpha", "beta")]
    holders: set[str] = set()

    def all_have_trained() -> bool:
        for file in var_dir.glob("device-*.turns"):
            holders.update(match[0] for match in re.finditer(r"\w+ of \w+", file.read_text()))
        return all(len(node.steps()) == 3 for node in nodes)

    try:
        wait_until(all_have_trained, *nodes, timeout_s=START_TIMEOUT_S, what="three steps of both", poll_s=0.005)
    finally:
        for node in nodes:
            node.kill_all()
    assert holders == {"generator of alpha", "generator of beta", "trainer of alpha", "trainer of beta"}


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

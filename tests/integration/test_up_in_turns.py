"""Generators and trainers of two nodes that use one device in turns: real processes, the whole way."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from swarm_cli.evaluations import read_steps
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
    out, err = process.communicate(timeout=30)

    assert process.returncode == 0, f"{out[-4000:]}\n{err[-2000:]}"
    assert holders == {"generator of alpha", "generator of beta", "trainer of alpha", "trainer of beta"}
    assert len(read_steps(swarm.node_dir("alpha"))) == len(read_steps(swarm.node_dir("beta"))) == 3

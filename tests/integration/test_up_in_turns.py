"""Generators and trainers of two nodes that use one device in turns: real processes, the whole
way.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from shared.device_turns import DeviceTurns, turns_file
from swarm_cli.observe.evaluations import read_steps
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


async def test_a_generator_that_waits_for_its_first_turn_ends_when_asked(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, SWARM_MODEL__DEVICE_TURNS="true")
    file = turns_file(tmp_path / "var", "auto")
    file.parent.mkdir()
    async with DeviceTurns(file, "somebody else").turn():
        process = swarm.up("--nodes", "1", "--steps", "3")
        await asyncio.to_thread(_until_somebody_waits, file, process)
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 143, f"{out[-4000:]}\n{err[-2000:]}"
    assert "is killed" not in out + err, "the generator ended when asked, while it waited"


def _until_somebody_waits(file: Path, process: subprocess.Popen[str]) -> None:
    turns, deadline = DeviceTurns(file, "a look"), time.monotonic() + START_TIMEOUT_S
    while not turns.wanted() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)

"""A node without a trainer, as `swarm up --roles` starts it: it shares and is well."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.local_swarm import Swarm


@pytest.mark.slow
def test_a_node_of_generator_and_verifier_makes_and_shares_groups_and_nothing_misses_its_trainer(tmp_path: Path) -> None:
    pace = {"SWARM_GENERATOR__GROUPS_PER_MINUTE": "240", "SWARM_EVAL__TASKS": "0"}
    swarm = Swarm(tmp_path, **pace)
    running = swarm.up("--nodes", "1", "--name", "teacher", "--roles", "verifier,generator", "--verbose")
    try:
        deadline, node = time.monotonic() + 240.0, {}
        while not (node.get("services", {}).get("verifier") and node["services"]["verifier"][0]["figures"].get("shared")):
            assert running.poll() is None and time.monotonic() < deadline, running.communicate(timeout=60)
            node = swarm.status("teacher").get("nodes", {}).get("teacher", {})
            time.sleep(0.5)
        assert node["kind"] == "running" and node["trouble"] == [], node
        assert {role for role, processes in node["services"].items() if processes} == {"generator", "verifier"}
        looked = swarm.call("status", "teacher", "--node-url", f"nats://127.0.0.1:{swarm.nats_port}")
        assert looked.returncode == 0 and "no trainer" in looked.stdout, looked.stdout
        assert swarm.call("down", "first").returncode == 0
        out, err = running.communicate(timeout=120)
    finally:
        if running.poll() is None:
            running.kill()
            running.communicate(timeout=60)
    assert running.returncode == 0 and "Traceback" not in out, out[-3000:] + err[-3000:]
    assert not (swarm.node_dir("teacher") / "trainer.log").exists()
    refused = swarm.up_to_the_end("--nodes", "1", "--roles", "generator,verifier", "--steps", "3")
    assert refused.returncode == 1 and "--steps" in refused.stderr

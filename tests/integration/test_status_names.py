"""`swarm status` reports that another machine holds a node's name only on a machine that has a
node of that name too.
"""

from __future__ import annotations

import io
import time
from pathlib import Path

from rich.console import Console

from shared.config import load_config
from shared.contracts.codec import encode
from shared.contracts.control import LeaseRecord
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_bucket
from shared.transport.connect import connect
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.observe.snapshot import take_snapshot
from swarm_cli.observe.status import show
from swarm_cli.target import Target


async def test_a_node_in_a_cluster_holds_its_name_alone_unless_this_machine_has_a_node_of_that_name(
    nats_url: str, tmp_path: Path
) -> None:
    plane = await connect(nats_url, name="test", timeout_s=10)
    await ensure_node_streams(plane, "alpha")
    for role, pod in {"trainer": "alpha-trainer-0", "sampler": "alpha-sampler-b", "generator.a": "alpha-generator-a"}.items():
        record = LeaseRecord(holder=role, run="run-1", host=pod, pid=7, taken_at=time.time(), lease_s=600.0)
        await plane.kv.put(node_bucket("alpha"), f"lease.{role}", encode(record))
    await plane.close()

    async def seen() -> tuple[str, list[str]]:
        config = load_config(DEMO_CONFIG, overrides={"node": {"var_dir": str(tmp_path)}})
        snapshot = await take_snapshot(config, Target(nats_url, nats_url), ["alpha"], timeout_s=30.0)
        written = io.StringIO()
        show(snapshot, Console(file=written, width=300))
        return written.getvalue(), snapshot.nodes[0].held_on()

    told, held_on = await seen()
    assert "another machine" not in told and held_on == []
    (tmp_path / "runs" / "mine" / "alpha").mkdir(parents=True)
    told, held_on = await seen()
    assert "another machine holds this name: alpha-generator-a (run run-1), " in told
    assert len(held_on) == 3

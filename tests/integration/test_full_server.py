"""A NATS server whose disk is full answers and stores nothing until it is restarted. Commands, page
and progress view name it, the disk and that one remedy, and no process that only waits for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.full_disk import can_mount, on_small_disk

DISK_BYTES = 24 * 2**20


@pytest.mark.skipif(not can_mount(), reason="no small file system can be mounted here")
def test_every_view_names_a_full_server_its_disk_and_its_restart_until_it_stores_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SWARM_NODE__VAR_DIR", "SWARM_NATS__NODE_URL", "SWARM_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    command = [sys.executable, "-m", "tests.integration.full_server", str(tmp_path)]
    done = on_small_disk(tmp_path, DISK_BYTES, command, timeout_s=900)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["before"] == "" and "full disk" in told["write"]
    assert told["page's state"] == "unstored"
    for view in ("status", "top", "page", "progress"):
        words = " ".join(told[view].split())
        assert "the NATS server of run now answers but cannot store (" in words and "no space left on device" in words, (view, told)
        assert " has 0 of 24 MiB free: free space on it, then `swarm restart nats" in words, (view, told)
        assert "swarm restart alpha" not in words and "swarm restart beta" not in words, (view, told)
    assert "full disk" in told["write with space"], "it goes on by itself: the runbooks say that it must be restarted"
    assert "cannot store" in told["with space"] and "of 24 MiB free; `swarm restart nats" in told["with space"], told
    assert told["write restarted"] == "" == told["restarted"]

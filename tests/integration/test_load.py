"""A thousand nodes on one hub, in a short form of `python -m benchmarks.load`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.load import FOREIGN, POOL, Setting, measure

MEMORY_MB = 50.0
"""Nothing that grows with the names it has heard may take more: a thousand names are a few MB."""


@pytest.mark.slow
@pytest.mark.deadline(240)
async def test_beside_a_thousand_nodes_groups_are_accepted_and_nobody_is_told_as_a_flood_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    short = Setting(
        identities=1000, each_per_s=0.1, tokens=64, settle_s=5.0, seconds=15.0, nodes=1, parts=1, newcomer=False, every_s=5.0
    )
    record = await measure(short, tmp_path)
    node = record.intervals[-1]["nodes"]["alpha"]
    assert node["accepted"] >= POOL + FOREIGN and record.waits_s
    assert not node["rejected"].get("flood") and not record.told_as_flood and node["flood_per_s"] == 0.0
    assert record.acknowledged >= 1000 and record.crowd["senders"] == 1000 and record.crowd["failed"] == 0
    assert record.lost == 0
    assert record.summary["node_memory_growth_mb"] < MEMORY_MB
    assert record.status["exit_code"] == 0

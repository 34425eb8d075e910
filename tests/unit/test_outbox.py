"""The outbox is bounded by bytes, not only by groups: long groups are far fewer than 512."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from services.verifier import sharing
from services.verifier.figures import Figures
from services.verifier.swarm_reader import SwarmLink
from shared.config import load_config
from shared.identity.keys import SigningKey, new_seed
from shared.runtime.status import StatusBoard
from tests.unit.test_border import group

MIB = 2**20


@pytest.mark.parametrize(("size_bytes", "offered", "kept"), [(4 * MIB, 40, 32), (4 * MIB + 1, 40, 31), (200 * MIB, 3, 1)])
async def test_an_outbox_of_large_groups_keeps_128_mib_and_at_least_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, offered: int, kept: int
) -> None:
    payload = bytes(size_bytes)  # one object for all groups, so that the test needs no memory
    monkeypatch.setattr(sharing, "encode", lambda _: payload)
    config = load_config(None, {"node": {"id": "beta", "var_dir": str(tmp_path)}, "tasks": [{"dataset": "gcd"}]})
    log, registry = structlog.get_logger("verifier"), CollectorRegistry()
    figures = Figures(registry, StatusBoard("beta", "verifier", "0"))
    link = SwarmLink(config, figures, log)
    outbox = sharing.Outbox(config.verifier, SigningKey(new_seed()), link, figures, log)
    for number in range(offered):
        outbox.offer(group(number), f"{number:064x}", [1.0, 0.0])
    metrics = generate_latest(registry).decode()
    assert f"swarm_outbox_groups {kept}.0" in metrics
    assert f'swarm_rollout_publish_total{{plane="swarm",result="dropped"}} {offered - kept}.0' in metrics
    assert [parcel.group_id for parcel in outbox._waiting] == [f"{number:064x}" for number in range(offered - kept, offered)]

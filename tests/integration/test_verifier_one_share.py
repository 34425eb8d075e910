"""A key has one share of the intake, whatever it is known by when its groups are read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from services.verifier.swarm_reader import BURST_S
from shared.contracts.streams import ensure_swarm_streams
from shared.identity.keys import SigningKey, new_seed
from shared.transport.connect import connect
from tests.integration.running_verifier import configured, until, verifier
from tests.integration.test_verifier_trust import BUDGET_PER_S, share
from tests.nats_server import NatsServer


async def test_what_waits_under_a_name_of_nobodys_and_then_under_its_key_has_one_share(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    """A newcomer's first groups are read before its key is known, and its later ones afterwards."""
    config = configured("alpha", nats_server().url, tmp_path, intake_groups_per_s=BUDGET_PER_S)
    key, each = SigningKey(new_seed()), 50
    publishing = await connect(config.nats.node_url, name="others")
    await ensure_swarm_streams(publishing)
    for index in range(each):
        await share(publishing, key, "mallory", index)
    began = time.monotonic()
    async with verifier(config) as alpha:
        await until(lambda: alpha.status.get("accepted") >= 1)
        for index in range(each, 2 * each):
            await share(publishing, key, "mallory", index)
        await until(lambda: alpha.status.get("accepted") >= 30)
        taken = alpha.status.get("accepted")
        lasted_s = time.monotonic() - began
        assert not alpha.status.get("refused_flood"), "what waited lost nothing when the key became known"
    await publishing.close()
    assert taken <= 0.5 * BUDGET_PER_S * (lasted_s + BURST_S) + 1

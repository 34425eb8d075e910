"""Two nodes of one name at a hub, each with a server and a key of its own: the second is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry

from services.verifier import sharing
from services.verifier.service import VerifierService
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.control import NodeRecord
from shared.contracts.streams import prepare_node_streams
from shared.identity.statements import statement_content
from shared.runtime import FatalError, ServiceContext
from shared.runtime.planes import connect_node_plane
from shared.runtime.status import StatusBoard
from tests.integration.running_verifier import configured, generate, group, until, verifier
from tests.nats_server import NatsServer

pytestmark = pytest.mark.slow


async def live(config: NodeConfig) -> None:
    """A verifier until it ends by itself."""
    node = await connect_node_plane(config, "verifier")
    try:
        await prepare_node_streams(node, config.node.id, create=True)
        board, log = StatusBoard(config.node.id, "verifier", "0"), structlog.get_logger("verifier")
        context = ServiceContext(config, "verifier", "0", node, log, CollectorRegistry(), board, asyncio.Event())
        await asyncio.wait_for(VerifierService(config).run(context), 120)
    finally:
        await node.close()


async def test_a_second_node_of_a_name_that_the_hub_knows_ends_with_the_remedy_and_the_first_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "RECORD_PERIOD_S", 0.5)
    hub, site = NatsServer(tmp_path / "hub").start(), NatsServer(tmp_path / "site").start()
    try:
        async with verifier(configured("alpha", hub.url, tmp_path / "one")) as first:
            await generate(first.node, group("alpha", 0))

            async def key() -> str | None:
                entry = await first.node.kv.get(subjects.SWARM_NODES_BUCKET, "alpha")
                return statement_content(entry.value, NodeRecord).public_key if entry is not None else None

            async def known() -> bool:
                return await key() is not None

            await until(known)
            mine = await key()
            with pytest.raises(FatalError, match=rf"name alpha is taken in this swarm: .*{mine} renews .*node\.id"):
                await live(configured("alpha", site.url, tmp_path / "two", swarm_url=hub.url))
            assert await key() == mine
            await generate(first.node, group("alpha", 1))
            await until(lambda: first.status.get("shared") == 2)
    finally:
        hub.stop()
        site.stop()

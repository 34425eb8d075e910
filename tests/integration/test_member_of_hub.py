"""A member of a secured hub may not ask the server about streams: what it finds out all the same,
by direct gets, and what it does where nobody answers those.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nkeys
import pytest
import structlog
from prometheus_client import CollectorRegistry
from rich.console import Console

from services.verifier import swarm_reader
from services.verifier.figures import Figures
from services.verifier.swarm_reader import SwarmLink
from shared.contracts import subjects
from shared.contracts.streams import prepare_swarm_streams
from shared.runtime import FatalError
from shared.runtime.planes import connect_swarm_plane
from shared.runtime.status import StatusBoard
from shared.transport.base import AccessDenied, Transport
from swarm_cli.join import hub as join_hub
from swarm_cli.observe.snapshot import SwarmState, _fills
from swarm_cli.observe.status import _fill_object, show
from tests.integration.running_verifier import until
from tests.secured_server import SecuredServer

log = structlog.get_logger("verifier")


@pytest.fixture(name="hub", scope="module")
def _hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("hub")
    server = SecuredServer(folder, ["alpha", "beta"])
    server.start()
    server.init("swarm", server.config("alpha", folder))
    yield server
    server.stop()


@asynccontextmanager
async def member(hub: SecuredServer, node: str, folder: Path) -> AsyncIterator[Transport]:
    plane = await connect_swarm_plane(hub.config(node, folder), "verifier", timeout_s=10.0)
    try:
        yield plane
    finally:
        await plane.close()


async def renew(plane: Transport, node: str) -> None:
    await plane.kv.put(subjects.SWARM_NODES_BUCKET, node, b"an entry")


class Clock:
    """This machine's clock, `ahead_s` seconds wrong."""

    def __init__(self, ahead_s: float) -> None:
        from time import time

        self.time = lambda: time() + ahead_s


async def test_a_verifier_whose_hub_is_slow_to_start_trains_alone_and_shares_when_it_is_there(tmp_path: Path) -> None:
    server = SecuredServer(tmp_path, ["alpha"])
    server.start()
    config = server.config("alpha", tmp_path)
    link = SwarmLink(config, Figures(CollectorRegistry(), StatusBoard("alpha", "verifier", "0")), log)
    assert not config.nats.create_streams
    await link.begin()  # does not end the process: whether the streams are missing or only slow cannot be told
    running = asyncio.create_task(link.run())
    try:
        await asyncio.sleep(3.0)
        assert not link._prepared
        await asyncio.to_thread(server.init, "swarm", config)
        await until(lambda: link._prepared)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await link.close()
        server.stop()


async def test_a_hub_that_goes_on_refusing_the_key_at_the_start_ends_the_verifier(
    hub: SecuredServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm_reader, "REFUSED_S", 3.0)
    stranger = tmp_path / "stranger.nk"
    stranger.write_text(nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode())
    config = hub.config("alpha", tmp_path, nats={"swarm_key_file": str(stranger)})
    link = SwarmLink(config, Figures(CollectorRegistry(), StatusBoard("alpha", "verifier", "0")), log)
    began = time.monotonic()
    with pytest.raises(FatalError, match=f"refuses the key in {stranger}"):
        await link.begin()
    assert time.monotonic() - began >= 3.0
    assert link.held is None
    await link.close()


async def test_a_member_that_may_make_missing_streams_finds_them_without_one_refusal(hub: SecuredServer, tmp_path: Path) -> None:
    before = len(hub.violations())
    async with member(hub, "alpha", tmp_path) as plane:
        await prepare_swarm_streams(plane, create=True)
        await prepare_swarm_streams(plane, create=False)
        with pytest.raises(AccessDenied, match="only an operator may ask"):
            await plane.stream_state(subjects.SWARM_ROLLOUTS)
    assert len(hub.violations()) == before


@pytest.mark.parametrize("ahead_s", [300.0, -300.0])
async def test_a_newcomer_learns_how_wrong_its_clock_is_from_the_entries_of_others(
    hub: SecuredServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    async with member(hub, "beta", tmp_path) as beta, member(hub, "alpha", tmp_path) as alpha:
        await renew(beta, "beta")
        monkeypatch.setattr(join_hub, "time", Clock(ahead_s))
        looking = asyncio.create_task(join_hub._skew_s(alpha))
        await asyncio.sleep(1.0)
        await renew(beta, "beta")
        skew_s = await looking
    assert skew_s is not None and abs(skew_s - ahead_s) < 30.0


async def test_the_clock_of_a_newcomer_is_right_if_an_entry_is_as_old_as_it_may_be(hub: SecuredServer, tmp_path: Path) -> None:
    async with member(hub, "beta", tmp_path) as beta, member(hub, "alpha", tmp_path) as alpha:
        await renew(beta, "beta")
        assert await join_hub._skew_s(alpha) == 0.0


async def test_where_nobody_renews_an_entry_a_clock_that_may_be_ahead_is_not_judged(
    hub: SecuredServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with member(hub, "beta", tmp_path) as beta, member(hub, "alpha", tmp_path) as alpha:
        await renew(beta, "beta")
        monkeypatch.setattr(join_hub, "time", Clock(300.0))
        assert await join_hub._skew_s(alpha) is None


async def test_a_member_sees_how_many_messages_the_swarm_keeps_but_not_their_size(hub: SecuredServer, tmp_path: Path) -> None:
    async with member(hub, "beta", tmp_path) as beta:
        for number in range(3):
            await beta.publish(subjects.rollouts("beta"), b"g", stream=subjects.SWARM_ROLLOUTS, message_id=f"g{number}")
        (fill,) = await _fills(beta, [subjects.SWARM_ROLLOUTS])
    assert (fill.state.messages, fill.state.last_seq, fill.state.size_bytes) == (3, 3, None)
    said = io.StringIO()
    show(SwarmState(time.time(), (), (fill,), True), Console(file=said, width=100))
    assert subjects.SWARM_ROLLOUTS in said.getvalue()
    assert json.loads(json.dumps(_fill_object(fill)))["size_bytes"] is None

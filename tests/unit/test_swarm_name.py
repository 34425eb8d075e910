"""A second node under a name that the swarm knows is told, and nobody can talk a node out of its
name.
"""

from __future__ import annotations

import itertools

import pytest
import structlog
from structlog.testing import capture_logs

from services.verifier.sharing import SILENT_S, TWIN_LOOKS, SwarmName
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import NodeRecord
from shared.contracts.wire import ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import sign_statement
from shared.runtime import FatalError
from shared.transport.base import Transport
from tests.nats_server import own_plane

_servers = itertools.count()
KEYS = {key.public_key: key for key in (SigningKey(new_seed()) for _ in range(4))}
A, B, C, X = KEYS


class Swarm:
    """A directory, and nodes that want to be in it, each with a server of its own."""

    async def open(self) -> Swarm:
        self.now_s = 0.0
        self.plane = await own_plane()
        await self.plane.kv.ensure(subjects.SWARM_NODES_BUCKET)
        return self

    async def node_plane(self) -> Transport:
        plane = await own_plane()
        await plane.kv.ensure(subjects.node_bucket("alpha"))
        return plane

    def name(self, key: str, plane: Transport) -> SwarmName:
        return SwarmName("alpha", key, "ours", plane, structlog.get_logger(), lambda: self.now_s)

    async def write(
        self, key: str, *, signer: str | None = None, swarm_id: str = "ours", signed: bool = True, at: float = 0.0
    ) -> None:
        """An entry that names `key`, signed by it where no other `signer` is given."""
        record = NodeRecord(
            node="alpha",
            public_key=key,
            model=ModelIdentity(name="tiny", tokenizer_hash="a" * 64),
            tasks=[],
            policy_version=0,
            software="swarm",
            updated_at=at,
        )
        entry = sign_statement(record, KEYS[signer or key], swarm_id) if signed else record
        await self.plane.kv.put(subjects.SWARM_NODES_BUCKET, "alpha", encode(entry))

    async def known(self, key: str, plane: Transport) -> SwarmName:
        """A node that the swarm has known as alpha."""
        name = self.name(key, plane)
        assert await name.may_write(self.plane)
        await self.write(key)
        await name.wrote(0.0)
        return name


async def test_a_second_node_of_another_key_is_refused_with_the_remedy_once_the_first_renews_its_entry() -> None:
    swarm = await Swarm().open()
    first = await swarm.known(A, await swarm.node_plane())
    second = swarm.name(B, await swarm.node_plane())
    assert not await second.may_write(swarm.plane)
    swarm.now_s += 10.0
    await swarm.write(A)
    with pytest.raises(FatalError, match=rf"name alpha is taken in this swarm: .* key {A} renews .*node\.id.*signing_key_file"):
        await second.may_write(swarm.plane)
    assert await first.may_write(swarm.plane)


async def test_an_entry_that_nobody_renews_is_left_behind() -> None:
    swarm = await Swarm().open()
    await swarm.write(A)
    newcomer = swarm.name(B, await swarm.node_plane())
    seen = []
    for _ in range(int(SILENT_S) + 1):
        seen.append(await newcomer.may_write(swarm.plane))
        swarm.now_s += 1.0
    assert seen == [False] * int(SILENT_S) + [True]


async def test_whoever_writes_the_entry_a_node_that_was_known_stays_also_after_a_restart_and_with_a_new_key() -> None:
    """The swarm plane is untrusted: its words end no node that was there first."""
    swarm = await Swarm().open()
    plane = await swarm.node_plane()
    running = await swarm.known(A, plane)
    for key in (A, C):
        again = swarm.name(key, plane)
        for _ in range(3):
            await swarm.write(X)
            assert await running.may_write(swarm.plane)
            assert await again.may_write(swarm.plane)


async def test_an_entry_that_is_damaged_or_that_no_key_signed_for_this_swarm_is_nobodys() -> None:
    """Otherwise whoever may write there could keep every newcomer out."""
    swarm = await Swarm().open()
    await swarm.write(B, signed=False)
    assert await swarm.name(A, await swarm.node_plane()).may_write(swarm.plane)
    await swarm.write(B, signer=X)
    assert await swarm.name(A, await swarm.node_plane()).may_write(swarm.plane)
    await swarm.write(B, swarm_id="another")
    assert await swarm.name(A, await swarm.node_plane()).may_write(swarm.plane)
    await swarm.plane.kv.put(subjects.SWARM_NODES_BUCKET, "alpha", b"\x00")
    assert await swarm.name(A, await swarm.node_plane()).may_write(swarm.plane)


async def looks(swarm: Swarm, name: SwarmName, *, others: list[SwarmName], start: float) -> list[str]:
    """Return what the log says while `name` and the `others` renew the entry in turn."""
    with capture_logs() as logs:
        at = start
        for _ in range(2 * TWIN_LOOKS):
            assert await name.may_write(swarm.plane)
            at += 1.0
            await swarm.write(A, at=at)
            await name.wrote(at)
            for other in others:
                assert await other.may_write(swarm.plane)
                at += 1.0
                await swarm.write(A, at=at)
                await other.wrote(at)
    return [line["event"] for line in logs]


async def test_a_copy_of_a_node_on_a_server_of_its_own_is_told_once_by_both_and_replicas_are_not() -> None:
    swarm = await Swarm().open()
    mine, copied = await swarm.node_plane(), await swarm.node_plane()
    first, replica = await swarm.known(A, mine), await swarm.known(A, mine)
    assert await looks(swarm, first, others=[replica], start=10.0) == []
    copy = swarm.name(A, copied)
    assert await looks(swarm, first, others=[copy], start=100.0) == ["key_used_twice"] * 2


async def test_a_nodes_own_entry_that_somebody_puts_there_again_is_no_copy_of_the_node() -> None:
    swarm = await Swarm().open()
    plane = await swarm.node_plane()
    name = await swarm.known(A, plane)
    with capture_logs() as logs:
        for at in range(1, 2 * TWIN_LOOKS):
            await swarm.write(A, at=float(at))
            await name.wrote(float(at))
            await swarm.write(A, at=0.0)
            assert await name.may_write(swarm.plane)
    assert logs == []

"""A hub whose accounts are claims: a node is added, replaced and shut out on running servers, and
what is wrong with claims is told with its cause and a remedy.

What keys may do there is in the tests of permissions, replies, leaves and limits, which run with
both forms of accounts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nkeys
import pytest

from shared.contracts import subjects
from shared.identity.keys import SigningKey, new_seed
from shared.runtime.planes import connect_swarm_plane
from shared.transport.base import AccessDenied, NotConnected, Transport
from shared.transport.connect import connect
from shared.transport.nats.claims import ACCOUNT, identity, key_of, public_key, signed, user_claims
from shared.transport.nats.client import ServerMisbehaves, checked_info
from shared.transport.nats.transport import connection_of
from swarm_cli.errors import CommandError
from swarm_cli.nats.claims import push_now
from tests.integration.running_verifier import until
from tests.nats_server import free_port
from tests.secured_server import SecuredServer, swarm


class Hub(SecuredServer):
    """A hub that started with alpha alone; beta and mallory have keys."""

    def __init__(self, folder: Path, **more: object) -> None:
        super().__init__(folder, ["alpha"], plane="swarm", accounts="claims", **more)  # type: ignore[arg-type]
        swarm("nats", "keys", "beta", "mallory", "--folder", str(self.keys))

    def push(self, *nodes: str, connections: int = 4) -> None:
        """As the operator does it."""
        which = ("--plane", "swarm", "--accounts", "claims", "--node-connections", str(connections))
        where = ("--folder", str(self.keys), "--push", self.url, "--hub-ca", str(self.ca_file))
        swarm("nats", "config", "--nodes", ",".join(nodes), *which, *where)

    async def member(self, node: str, *, refused_s: float = 0.0, timeout_s: float = 5.0) -> Transport:
        config = self.config(node, self.folder)
        return await connect_swarm_plane(config, "verifier", timeout_s=timeout_s, refused_s=refused_s)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Hub]:
    hub = Hub(folder)
    hub.start()
    try:
        await asyncio.to_thread(hub.init, "swarm", hub.config("alpha", folder))
        yield hub
    finally:
        hub.stop()


async def share(plane: Transport, node: str) -> int:
    ack = await plane.publish(
        subjects.rollouts(node), os.urandom(8), stream=subjects.SWARM_ROLLOUTS, message_id=os.urandom(4).hex(), timeout_s=10.0
    )
    return ack.seq


async def test_a_push_admits_a_waiting_node_without_a_reload_and_nobody_else_notices(tmp_path: Path):
    async with running(tmp_path) as hub:
        alpha = await hub.member("alpha")
        waiting = asyncio.create_task(hub.member("beta", refused_s=60.0))
        await until(lambda: hub.log_file.read_text().count("authentication error") >= 1, 30)
        await asyncio.to_thread(hub.push, "beta")
        beta = await asyncio.wait_for(waiting, 60)
        assert await share(beta, "beta") > 0 and await share(alpha, "alpha") > 0
        assert connection_of(alpha).epoch == 1 and "Reloaded" not in hub.log_file.read_text()
        for plane in (alpha, beta):
            await plane.close()


async def test_a_node_that_is_shut_out_is_disconnected_and_told_and_a_restart_does_not_let_it_in(tmp_path: Path):
    async with running(tmp_path) as hub:
        await asyncio.to_thread(hub.push, "mallory")
        mallory = await hub.member("mallory")
        stolen, key_file = SigningKey((hub.keys / "mallory" / "swarm.nk").read_bytes().strip()), tmp_path / "new.nk"
        key_file.write_bytes(new_seed())
        replacement = SigningKey(key_file.read_bytes())
        await asyncio.to_thread(hub.push, f"mallory={replacement.public_key}")
        await until(lambda: not mallory.connected, 30)
        await mallory.close()
        with pytest.raises(AccessDenied, match="refuses the key"):
            await hub.member("mallory")
        await asyncio.to_thread(hub.push, f"mallory={stolen.public_key}")
        mallory = await hub.member("mallory")
        await asyncio.to_thread(hub.push, "mallory", connections=0)
        await until(lambda: not mallory.connected, 30)
        await mallory.close()
        for _ in range(2):
            with pytest.raises(NotConnected, match="operator has shut it out"):
                await hub.member("mallory", timeout_s=6.0)
            await asyncio.to_thread(hub.restart)
        alpha = await hub.member("alpha", timeout_s=30.0)
        assert await share(alpha, "alpha") > 0
        await alpha.close()


async def test_a_server_that_lost_its_folder_knows_the_accounts_of_its_file_and_gets_the_rest_by_a_push(tmp_path: Path):
    async with running(tmp_path) as hub:
        await asyncio.to_thread(hub.push, "beta")
        hub.kill()
        shutil.rmtree(tmp_path / "nats-swarm-accounts")
        hub.start()
        alpha = await hub.member("alpha", timeout_s=30.0)
        with pytest.raises(AccessDenied, match="--push, and again if it lost them"):
            await hub.member("beta", timeout_s=10.0)
        waiting = asyncio.create_task(hub.member("beta", refused_s=60.0, timeout_s=10.0))
        await asyncio.to_thread(hub.push, "beta")
        beta = await asyncio.wait_for(waiting, 60)
        assert await share(beta, "beta") > 0
        for plane in (alpha, beta):
            await plane.close()


async def test_a_push_reaches_every_server_of_a_cluster_and_says_on_how_many_it_is(tmp_path: Path):
    routes = [free_port() for _ in range(3)]
    first = Hub(tmp_path / "0")
    hubs = [first, *(Hub(tmp_path / str(number), keys=first.keys) for number in (1, 2))]
    for hub, port in zip(hubs, routes, strict=True):
        # One text for all, as of one operator; each has its own certificate.
        trusted = first._text[first._text.index("operator:") : first._text.index("swarm_max_connections:")]
        own = hub._text
        hub._text = own[: own.index("operator:")] + trusted + own[own.index("swarm_max_connections:") :]
        others = ", ".join(f'"nats://127.0.0.1:{other}"' for other in routes)
        hub.configure(f'server_name: "s{port}"\ncluster {{ name: c, host: 127.0.0.1, port: {port}, routes: [{others}] }}\n')
    try:
        for hub in hubs:
            hub.start()
        await until(lambda: all(hub.log_file.read_text().count("Route connection created") >= 2 for hub in hubs), 60)
        key, ca = first.keys / "operator" / "claims.nk", str(first.ca_file)
        await asyncio.to_thread(first.push, "beta")
        assert await asyncio.to_thread(push_now, first.url, key, ca, {}) == 3
        for hub in hubs:
            plane = await hub.member("beta")
            await plane.close()
    finally:
        for hub in hubs:
            hub.kill()


async def test_claims_that_do_not_fit_are_told_with_cause_and_remedy(tmp_path: Path):
    async with running(tmp_path) as hub:
        ca, key = str(hub.ca_file), key_of((hub.keys / "alpha" / "swarm.nk").read_text())
        body = {"issuer_account": identity("SWARM_ALPHA")}
        expired = signed("user", public_key(key), "alpha", body, key, ACCOUNT, expires_at=1_000_000_000)
        stranger = key_of(new_seed().decode())
        foreign = user_claims(stranger, "SWARM_ALPHA")
        cases = {
            expired: "its claims ran out",
            "e30.W10.e30": "holds no user's claims",
            foreign: "the server refuses the key in",
        }
        for number, (token, message) in enumerate(cases.items()):
            file = tmp_path / f"{number}.creds"
            file.write_text(
                f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
                f"-----BEGIN USER NKEY SEED-----\n{new_seed().decode()}\n------END USER NKEY SEED------\n"
            )
            with pytest.raises(AccessDenied, match=message):
                await connect(hub.url, name="x", timeout_s=20.0, key_file=str(file), ca_file=ca)
        other = tmp_path / "other.nk"
        other.write_bytes(nkeys.encode_seed(bytearray(range(32)), nkeys.PREFIX_BYTE_USER))
        with pytest.raises(CommandError, match=f"refuses the key in {other}"):
            await asyncio.to_thread(push_now, hub.url, other, ca, {})
        with pytest.raises(ServerMisbehaves):
            checked_info({"nonce": expired})

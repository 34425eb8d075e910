"""A hub and a site's leaf server with keys: the hub holds a site to the account of the node whose
key it came with.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nats
import pytest

from shared.contracts import subjects
from shared.contracts.streams import prepare_node_streams, prepare_swarm_streams
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.transport.base import Transport, TransportError
from tests.integration.nats_users import everything, raw
from tests.nats_server import free_port
from tests.secured_server import SecuredServer

HUB = "hub"


@dataclass(frozen=True)
class Site:
    """The swarm's server, and alpha's own, which is a leaf of it. Mallory has a key for the hub
    too.
    """

    hub: SecuredServer
    leaf: SecuredServer

    async def swarm_plane(self, folder: Path) -> Transport:
        config = self.leaf.config("alpha", folder, nats={"swarm_domain": HUB})
        return await connect_swarm_plane(config, "verifier", timeout_s=10.0)


@pytest.fixture(scope="module", params=["text", "claims"])
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    leaf_port = str(free_port())
    further = ("--domain", HUB, "--leaf-port", leaf_port)
    hub = SecuredServer(folder / "hub", ["alpha", "mallory"], plane="swarm", more=further, accounts=request.param)
    hub.start()
    hub.init("swarm", hub.config("alpha", folder))
    towards = (
        "--hub-url",
        f"tls://127.0.0.1:{leaf_port}",
        "--hub-ca",
        str(hub.ca_file),
        "--hub-domain",
        HUB,
        "--accounts",
        request.param,
    )
    leaf = SecuredServer(folder / "leaf", ["alpha"], plane="node", keys=hub.keys, more=towards)
    leaf.environment["SWARM_KEY_ALPHA"] = (leaf.keys / "alpha" / "swarm.nk").read_text().strip()
    leaf.start()
    leaf.init("node", leaf.config("alpha", folder))
    yield Site(hub, leaf)
    leaf.stop()
    hub.stop()


async def until_works(swarm: Transport, timeout_s: float = 30.0) -> None:
    """A leaf needs a moment to reach its hub."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await prepare_swarm_streams(swarm, create=False)
        except TransportError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.1)


async def test_a_node_does_its_whole_work_on_the_swarm_through_its_leaf_without_one_refusal(site: Site, tmp_path: Path):
    before = len(site.hub.violations()), len(site.leaf.violations())
    swarm = await site.swarm_plane(tmp_path)
    large = b"x" * (9 * 2**20)
    try:
        await until_works(swarm)
        for name, payload in (("small", b"1"), ("large", large)):
            await swarm.publish(
                subjects.rollouts("alpha"), payload, stream=subjects.SWARM_ROLLOUTS, message_id=name, timeout_s=60.0
            )
        await swarm.publish(subjects.evals("alpha"), b"scores", stream=subjects.SWARM_EVALS, message_id="scores")
        await swarm.kv.put(subjects.SWARM_NODES_BUCKET, "alpha", b"here")
        read = await swarm.read(subjects.SWARM_ROLLOUTS, 1, 10)
        assert [await swarm.payload(message) for message in read] == [b"1", large]
        assert (await swarm.ends(subjects.SWARM_ROLLOUTS)).messages == 2
        assert [entry.key for entry in (await swarm.kv.newest(subjects.SWARM_NODES_BUCKET, 1024))[0]] == ["alpha"]
        assert await swarm.get(subjects.SWARM_ROLLOUTS, 1) is not None
        assert await swarm.last(subjects.SWARM_EVALS, subjects.evals("alpha")) is not None
    finally:
        await swarm.close()
    for role in ("generator", "verifier", "sampler", "trainer"):
        plane = await connect_node_plane(site.leaf.config("alpha", tmp_path), role)
        await prepare_node_streams(plane, "alpha", create=False)
        await plane.close()
    assert (site.hub.violations()[before[0] :], site.leaf.violations()[before[1] :]) == ([], [])


TARGETS = (
    subjects.rollouts("mallory"),
    subjects.evals("mallory"),
    "$KV.swarm_nodes.mallory",
    "$JS.hub.API.$KV.swarm_nodes.mallory",
    *(
        f"{prefix}.{verb}.{subjects.SWARM_EVALS}"
        for prefix in ("$JS.API", f"$JS.{HUB}.API", "API")
        for verb in ("STREAM.PURGE", "STREAM.DELETE")
    ),
)


async def test_a_reply_subject_sent_through_a_leaf_leads_nowhere(site: Site, tmp_path: Path):
    """The site's own permissions are taken out first: all that the hub knows of a leaf is its
    key.
    """
    operator = await raw(site.hub, site.hub.keys / "operator" / "swarm.nk", "_INBOX_x.operator", [])
    swarm = await site.swarm_plane(tmp_path)
    await until_works(swarm)
    whole = site.leaf._text
    permissions = whole[whole.index("  HUB_ALPHA {") :]
    permissions = permissions[permissions.index("        permissions {") : permissions.index("        }\n      }\n") + 10]
    site.leaf._text = whole.replace(permissions, "")
    site.leaf.configure()
    site.leaf.reload()
    trust = ssl.create_default_context(cafile=str(site.leaf.ca_file))
    key = str(site.leaf.keys / "alpha" / "swarm.nk")
    await asyncio.sleep(1.0)
    client = await nats.connect(site.leaf.url, nkeys_seed=key, tls=trust, inbox_prefix="_INBOX_alpha.raw")
    try:
        await until_works(swarm)
        mine, reached = subjects.rollouts("alpha"), list[str]()
        for number, target in enumerate(TARGETS):
            body = b"" if ".API." in target and "$KV" not in target else b"forged"
            headers = {"Nats-Msg-Id": f"bait-{number}"}
            stored = json.loads((await client.request(mine, body, headers=headers, timeout=10)).data)["seq"]
            got = await client.request(f"$JS.{HUB}.API.DIRECT.GET.{subjects.SWARM_ROLLOUTS}", json.dumps({"seq": stored}).encode())
            assert got.data == body, "what follows is answered, only not where it asks for"
            before = await everything(operator)
            # As the server itself says who asks; a leaf could say it too.
            forged = {"Nats-Request-Info": json.dumps({"acc": "SWARM", "svc": "SWARM"})}
            for prefix in ("$JS.API", f"$JS.{HUB}.API"):
                get = f"{prefix}.DIRECT.GET.{subjects.SWARM_ROLLOUTS}"
                for form in ({"seq": stored}, {"seq": stored, "batch": 1}, {"last_by_subj": mine}, {"multi_last": [mine]}):
                    await client.publish(get, json.dumps(form).encode(), reply=target)
                    await client.publish(get, json.dumps(form).encode(), reply=target, headers=forged)
            await client.publish(mine, body, reply=target, headers=headers)
            await client.publish(target, body, reply=client.new_inbox())
            await client.publish(target, body, reply=client.new_inbox(), headers=forged)
            await client.flush()
            await asyncio.sleep(0.3)
            if await everything(operator) != before:
                reached.append(target)
        assert reached == []
    finally:
        site.leaf._text = whole
        site.leaf.configure()
        site.leaf.reload()
        for connection in (client, operator, swarm):
            await connection.close()

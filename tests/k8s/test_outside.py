"""Nodes outside the cluster, on real servers from the rendered configuration: one joins through
the listener of `nats-expose` with its key, a site's servers through `nats-leaf`, and what a key may
hold is bounded.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import nats
import nats.errors
import pytest

from shared.contracts import subjects
from shared.contracts.streams import ensure_node_streams, prepare_swarm_streams
from shared.identity.keys import load_or_create
from shared.transport.base import AccessDenied, NotConnected, StreamSpec, Transport, TransportError
from shared.transport.connect import connect
from tests.k8s.manifests import Object, find, kubernetes_pages, pod_of, render, with_kind
from tests.k8s.rendered_server import RenderedServer
from tests.secured_server import make_certificates, swarm

HUB_NODES = ("alpha", "delta", "eve")
"""Alpha and eve have their streams on the hub, delta at home."""
DEADLINE_S = 180.0


def certificate(folder: Path) -> dict[str, str]:
    """Secret nats-server-tls, for 127.0.0.1."""
    made = make_certificates(folder)
    return {name: path.read_text() for name, path in zip(("ca.crt", "tls.crt", "tls.key"), made, strict=True)}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    swarm("nats", "keys", *HUB_NODES, "stranger", "operator", "--folder", str(folder))
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[RenderedServer]:
    """A server of the cluster overlay with `nats-expose`, its accounts written as
    docs/kubernetes-change.md says.
    """
    folder = tmp_path_factory.mktemp("hub")
    server = RenderedServer(render("cluster-exposed-one-server"), folder / "nats-0")
    files = certificate(folder / "made")
    (folder / "ca.crt").write_text(files["ca.crt"])
    server.mount("nats-tls", files)
    known = load_or_create(keys / "delta/swarm.nk").public_key  # all that the hub's operator has of delta
    which = (
        "--accounts-only",
        "--plane",
        "both",
        "--nodes",
        f"alpha,eve,delta={known}",
        "--domain",
        "hub",
        "--node-storage-gib",
        "6",
    )
    server.mount("nats-accounts", {"accounts.conf": swarm("nats", "config", *which, "--folder", str(keys))})
    yield server.start()
    server.end()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, keys: Path, hub: RenderedServer) -> Iterator[RenderedServer]:
    """Delta's server of the overlay `joined` with `nats-leaf`."""
    folder = tmp_path_factory.mktemp("site")
    server = RenderedServer(render("joined-leaf"), folder / "nats-0", "site-0")
    files = certificate(folder / "made")
    (folder / "ca.crt").write_text(files["ca.crt"])
    server.swaps["/etc/nats-hub"] = str(server.folder / "etc/nats-hub")
    server.mount("nats-tls", files)
    server.mount("nats-hub", {"ca.crt": (hub.folder.parent / "ca.crt").read_text()})
    towards = ("--hub-url", f"tls://127.0.0.1:{hub.ports[7422]}", "--hub-ca", "/etc/nats-hub/ca.crt")
    accounts = swarm("nats", "config", "--accounts-only", "--plane", "node", "--nodes", "delta", *towards, "--folder", str(keys))
    server.mount("nats-accounts", {"accounts.conf": accounts})
    # Secret nats-hub-keys, as `--from-file` makes it: with the line's end.
    server.environment["SWARM_KEY_DELTA"] = (keys / "delta/swarm.nk").read_text()
    yield server.start()
    server.end()


@asynccontextmanager
async def as_node(
    server: RenderedServer, keys: Path, node: str, *, key: str = "swarm", domain: str = ""
) -> AsyncIterator[Transport]:
    """A node's verifier on the swarm plane, or another user of `keys`."""
    inbox = f"_INBOX_{node}.{'verifier' if key == 'swarm' else key}"
    authority = str(server.folder.parent / "ca.crt")
    file = str(keys / node / f"{key}.nk") if key else None
    member = key == "swarm" and node != "operator"
    transport = await connect(
        server.url,
        name=node,
        timeout_s=5.0,
        key_file=file,
        ca_file=authority,
        inbox_prefix=inbox,
        domain=domain,
        may_ask=not member,
    )
    try:
        yield transport
    finally:
        await transport.close()


async def until_works(action: Callable[[], Awaitable[object]]) -> None:
    """A leaf needs a moment to reach its hub."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            await action()
            return
        except TransportError:
            assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def make_swarm_streams(hub: RenderedServer, keys: Path) -> None:
    async with as_node(hub, keys, "operator") as operator:
        await prepare_swarm_streams(operator, create=True)


async def share(plane: Transport, node: str, text: bytes, name: str) -> None:
    await plane.publish(subjects.rollouts(node), text, stream=subjects.SWARM_ROLLOUTS, message_id=name, timeout_s=5.0)


async def shared(plane: Transport) -> list[bytes]:
    return [await plane.payload(message) for message in await plane.read(subjects.SWARM_ROLLOUTS, 1, 100)]


async def test_an_outside_node_joins_through_the_exposed_listener_with_its_key_and_not_without(
    hub: RenderedServer, keys: Path
) -> None:
    await make_swarm_streams(hub, keys)
    async with as_node(hub, keys, "alpha") as inside, as_node(hub, keys, "eve") as outside:
        # As a node does that makes its own streams: those of the swarm are there.
        await prepare_swarm_streams(outside, create=True)
        await share(inside, "alpha", b"from inside", "inside")
        await share(outside, "eve", b"from outside", "outside")
        assert {b"from inside", b"from outside"} <= set(await shared(outside)) and await shared(inside) == await shared(outside)
        with pytest.raises(TransportError):
            await share(outside, "alpha", b"forged", "forged")
    for key in ("", "swarm"):
        with pytest.raises((AccessDenied, NotConnected)):
            async with as_node(hub, keys, "stranger", key=key):
                pass
    with pytest.raises((AccessDenied, NotConnected)):
        await connect(hub.url.replace("tls://", "nats://"), name="eve", timeout_s=3.0, key_file=str(keys / "eve/swarm.nk"))


async def test_a_site_publishes_to_the_swarm_through_its_leaf_and_is_given_what_others_share(
    hub: RenderedServer, site: RenderedServer, keys: Path
) -> None:
    await make_swarm_streams(hub, keys)
    async with (
        as_node(site, keys, "delta", domain="hub") as leaf,
        as_node(site, keys, "delta", key="operator") as own,
        as_node(hub, keys, "alpha") as inside,
    ):
        await until_works(lambda: share(leaf, "delta", b"from the site", "site"))
        assert "Leafnode connection created" in site.log, "as docs/kubernetes-change.md says"
        await share(inside, "alpha", b"for the site", "for-site")
        large = b"x" * (9 * 2**20)  # more than a message holds: in chunks
        await share(leaf, "delta", large, "large")
        assert {b"from the site", b"for the site", large} <= set(await shared(leaf))
        assert await shared(inside) == await shared(leaf)
        with pytest.raises(TransportError):
            await share(leaf, "alpha", b"forged", "forged-by-site")
        await ensure_node_streams(own, "delta")
        assert await own.stream_state(subjects.node_rollouts_stream("delta"))
    with pytest.raises((AccessDenied, NotConnected)):  # it has no streams there, so nobody who makes them
        async with as_node(hub, keys, "delta", key="operator"):
            pass


async def test_a_node_that_exceeds_its_storage_is_refused_and_others_are_not(hub: RenderedServer, keys: Path) -> None:
    """Six GiB: the streams of a node, which reserve 5.3, and no second such set."""
    greedy = StreamSpec(name="GREEDY", subjects=("greedy",), max_bytes=2 * 2**30)
    async with as_node(hub, keys, "eve", key="operator") as eve, as_node(hub, keys, "alpha", key="operator") as alpha:
        await ensure_node_streams(eve, "eve")
        with pytest.raises(TransportError, match="insufficient storage|resource"):
            await eve.ensure_stream(greedy)
        await ensure_node_streams(alpha, "alpha")


async def test_what_is_published_beyond_an_accounts_storage_is_refused(hub: RenderedServer, keys: Path, tmp_path: Path) -> None:
    """Also into a stream without a limit of its own, as that of policies is."""
    server = RenderedServer(render("cluster-exposed-one-server"), tmp_path / "nats-0")
    files = certificate(tmp_path / "made")
    (tmp_path / "ca.crt").write_text(files["ca.crt"])
    server.mount("nats-tls", files)
    which = ("--accounts-only", "--plane", "both", "--nodes", "eve", "--node-storage-gib", "1", "--folder", str(keys))
    accounts = swarm("nats", "config", *which).replace("max_file: 1GB", "max_file: 16MB")
    assert "max_file: 16MB" in accounts
    server.mount("nats-accounts", {"accounts.conf": accounts})
    server.start()
    try:
        async with as_node(server, keys, "eve", key="operator") as eve:
            await eve.ensure_stream(StreamSpec(name="OPEN", subjects=("open",)))
            with pytest.raises(TransportError, match="resource|storage"):
                for number in range(12):
                    await eve.publish("open", b"x" * 2**21, stream="OPEN", message_id=str(number), timeout_s=5.0)
            assert 4 <= (await eve.stream_state("OPEN")).messages <= 8
    finally:
        server.end()


async def test_a_message_larger_than_an_account_may_send_ends_its_connection(hub: RenderedServer, keys: Path) -> None:
    """Spectators send requests alone, and share one key: 64 KiB where a node has 8 MiB."""
    trust = ssl.create_default_context(cafile=str(hub.folder.parent / "ca.crt"))

    async def on_error(error: Exception) -> None:
        """What the server says with the end is lost with the connection; its log has it."""

    seed = str(keys / "operator/observer.nk")
    observer = await nats.connect(hub.url, nkeys_seed=seed, tls=trust, allow_reconnect=False, error_cb=on_error)
    subject = f"$JS.API.DIRECT.GET.{subjects.SWARM_EVALS}"
    await observer.publish(subject, b"x" * 60_000)
    await observer.flush()
    assert observer.is_connected
    observer._max_payload = 2**23  # an ill-meaning client takes no notice of what the server says
    await observer.publish(subject, b"x" * 70_000)
    deadline = time.monotonic() + DEADLINE_S
    while observer.is_connected and time.monotonic() < deadline:
        with suppress(nats.errors.Error):
            await observer.flush(timeout=1)
    assert not observer.is_connected and "maximum payload exceeded: 70000 vs 65536" in hub.log, hub.log[-2000:]
    await observer.close()


@pytest.mark.parametrize("variant", ["cluster-exposed", "joined", "joined-leaf-cluster"])
def test_the_server_takes_its_configuration(variant: str, keys: Path, tmp_path: Path) -> None:
    server = RenderedServer(render(variant), tmp_path / "nats-0")
    server.swaps["/etc/nats-hub"] = str(server.folder / "etc/nats-hub")
    if variant != "joined":
        files = certificate(tmp_path / "made")
        server.mount("nats-tls", files)
        server.mount("nats-hub", files)
        towards = ("--plane", "node", "--hub-url", "tls://hub.example.org:7422", "--hub-ca", "/etc/nats-hub/ca.crt")
        which = ("--plane", "both", "--domain", "hub") if variant == "cluster-exposed" else towards
        accounts = swarm("nats", "config", "--accounts-only", "--nodes", "delta", *which, "--folder", str(keys))
        server.mount("nats-accounts", {"accounts.conf": accounts})
        server.environment["SWARM_KEY_DELTA"] = (keys / "delta/swarm.nk").read_text()
    said = server.check()
    assert "is valid" in said, said


def test_only_ports_that_ask_for_a_key_are_exposed() -> None:
    objects = render("cluster-exposed")
    (outside,) = [each for each in with_kind(objects, "Service") if each["spec"].get("type", "ClusterIP") != "ClusterIP"]
    assert {port["port"] for port in outside["spec"]["ports"]} == {4222, 7422}
    policy: Object = find(objects, "NetworkPolicy", "nats-outside")["spec"]
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == [4222, 7422]
    container = pod_of(find(objects, "StatefulSet", "nats"))["containers"][0]
    assert {"nats", "leafnodes"} <= {port["name"] for port in container["ports"]}


def test_a_joined_nodes_verifier_alone_has_the_way_to_the_swarm_and_the_key_for_it() -> None:
    objects = render("joined")
    holders = [
        each["metadata"]["name"] for each in with_kind(objects, "Deployment", "StatefulSet") if "delta-swarm" in str(pod_of(each))
    ]
    assert holders == ["delta-verifier"]
    container = pod_of(find(objects, "Deployment", "delta-verifier"))["containers"][0]
    told = {entry["name"]: entry for entry in container["env"]}
    assert told["SWARM_NATS__SWARM_URL"]["valueFrom"] == {"secretKeyRef": {"name": "delta-swarm", "key": "url"}}
    assert not [each for each in with_kind(objects, "Deployment", "Job") if "swarm-operator" in str(pod_of(each))]


def test_the_documented_commands_make_what_a_joined_node_mounts() -> None:
    page = kubernetes_pages()
    section = page.partition("\n## Join from outside the cluster\n")[2].partition("\n## ")[0]
    made = {
        match[1]: set(re.findall(r"--from-(?:file|literal)=([^=\s]+)", match[0]))
        for match in re.finditer(r"kubectl -n swarm create (?:secret generic|configmap) (\S+).*", section)
    }
    assert {"url", "swarm.nk", "ca.crt"} == made["delta-swarm"] and made["delta-signing"] == {"node.nk"}
    assert made["nats-hub-keys"] == {"SWARM_KEY_DELTA"} and made["nats-hub"] == {"ca.crt"}
    for name in made:
        assert any(f"'{name}'" in str(each) for each in (*render("joined"), *render("joined-leaf"))), name

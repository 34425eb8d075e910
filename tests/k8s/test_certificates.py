"""The servers' certificate is rotated by the steps of docs/kubernetes-change.md on three real
servers of the rendered cluster, while a client is at work.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nats
import nats.errors
import pytest
import yaml
from nats.aio.subscription import Subscription

from shared.transport.base import AccessDenied
from shared.transport.connect import connect
from swarm_cli.k8s import certificates as made_certificates
from swarm_cli.k8s.secret_objects import server_names
from tests.k8s.manifests import K8S, kubernetes_pages, pod_of, render, with_kind, workloads
from tests.k8s.rendered_server import RenderedServer
from tests.secured_server import swarm

PAGE = kubernetes_pages()
SECTION = PAGE.partition("\n## Rotate a certificate\n")[2].partition("\n### ")[0]
OUTSIDE = "swarm.example.org"
"""A name for nodes outside the cluster."""


def documented(step: int) -> str:
    """The command lines of a numbered step."""
    text = re.split(r"^\d\. ", SECTION, flags=re.MULTILINE)[step]
    return "\n".join(re.findall(r"^       (\S.*)$", text, re.MULTILINE))


def apply(commands: str, folder: Path) -> dict[str, str]:
    """Secret nats-server-tls, as commands of the page would apply it: kubectl is a file here."""
    given = f'kubectl() {{ cat > applied.yaml; }}\nswarm() {{ {sys.executable} -m swarm_cli "$@"; }}\n'
    environment = os.environ | {"PYTHONPATH": str(K8S.parent)}
    done = subprocess.run(
        ["bash", "-euc", given + commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    applied = yaml.safe_load_all((folder / "applied.yaml").read_text())
    (data,) = [each["data"] for each in applied if each["metadata"]["name"] == "nats-server-tls"]
    return {name: base64.b64decode(text).decode() for name, text in data.items()}


def expire_in(folder: Path, days: int) -> None:
    """The servers' certificate, with a name more, as if made long ago."""
    key, authority, signer = ((folder / "keys" / name).read_text() for name in ("tls.key", "ca.crt", "ca.key"))
    made = datetime.now(UTC) - made_certificates.SERVER_LASTS + timedelta(days=days)
    names = [*server_names("swarm", ()), OUTSIDE]
    (folder / "keys" / "tls.crt").write_text(made_certificates.server(key, names, authority, signer, made))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the page's step 4 of "A cluster" leaves; the certificate has ten days left."""
    folder = tmp_path_factory.mktemp("authority")
    apply("swarm k8s secrets --nodes alpha,beta,gamma | kubectl", folder)
    expire_in(folder, 10)
    accounts = ("--accounts-only", "--plane", "both", "--nodes", "alpha", "--folder", str(folder / "keys"))
    (folder / "accounts.conf").write_text(swarm("nats", "config", *accounts))
    return folder


def secret(folder: Path) -> dict[str, str]:
    """Secret nats-server-tls, of what is in the folder of keys."""
    return {name: (folder / "keys" / name).read_text() for name in ("tls.crt", "tls.key", "ca.crt")}


@pytest.fixture
def servers(folder: Path, tmp_path: Path) -> Iterator[list[RenderedServer]]:
    objects = render("cluster")
    made = [RenderedServer(objects, tmp_path / f"nats-{index}", f"nats-{index}") for index in range(3)]
    for server in made:
        server.swaps |= {f"nats-{index}.nats-headless:6222": f"127.0.0.1:{other.ports[6222]}" for index, other in enumerate(made)}
        server.mount("nats-tls", secret(folder))
        server.mount("nats-accounts", {"accounts.conf": (folder / "accounts.conf").read_text()})
    for server in made:
        server.start(wait=False)
    for server in made:
        server.wait()
    yield made
    for server in made:
        server.end()


def presented_until(server: RenderedServer) -> float:
    """Unix time at which the certificate that the server presents now ends."""
    varz = json.load(urllib.request.urlopen(f"{server.monitor}/varz", timeout=10))
    return datetime.fromisoformat(varz["tls_cert_not_after"]).timestamp()


async def until_routed(servers: list[RenderedServer]) -> None:
    deadline = time.monotonic() + 30
    while [len(await routes(server)) for server in servers] != [2, 2, 2]:
        assert time.monotonic() < deadline, servers[0].log[-3000:]


async def routes(server: RenderedServer) -> set[str]:
    answer = await asyncio.to_thread(urllib.request.urlopen, f"{server.monitor}/routez", None, 10)
    return {each["remote_id"] for each in json.load(answer)["routes"]}


async def until_heard(sender: nats.NATS, heard: Subscription, word: bytes) -> None:
    """Say a word at one server until it arrives at another: what is published before that server's
    subscription is known here, or while the routes between them are made, is lost.
    """
    give_up_at = time.monotonic() + 100
    while True:
        await sender.publish("work", word)
        with suppress(nats.errors.TimeoutError):
            while (await heard.next_msg(timeout=1)).data != word:
                pass
            return
        assert time.monotonic() < give_up_at


async def test_a_certificate_is_rotated_by_the_documented_steps_and_clients_stay(
    servers: list[RenderedServer], folder: Path
) -> None:
    await until_routed(servers)
    trust = ssl.create_default_context(cafile=str(folder / "keys/ca.crt"))
    lost: list[object] = []

    async def on_lost(*what: object) -> None:
        lost.append(what)

    async def client(server: RenderedServer) -> nats.NATS:
        key = str(folder / "keys/operator/swarm.nk")
        told = {"disconnected_cb": on_lost, "error_cb": on_lost, "closed_cb": None}
        return await nats.connect(server.url, nkeys_seed=key, tls=trust, allow_reconnect=False, **told)

    at_work = [await client(server) for server in servers]
    heard = await at_work[0].subscribe("work")
    await at_work[0].flush()

    # 1. How long are they valid?
    before = [await asyncio.to_thread(presented_until, server) for server in servers]
    assert all(9 * 86_400 < ends - time.time() <= 10 * 86_400 for ends in before)

    # 2 and 3. A new one, the Secret, a reload of each.
    old, new = secret(folder), await asyncio.to_thread(apply, documented(2), folder)
    assert old["tls.key"] != new["tls.key"] and OUTSIDE in made_certificates.read(new["tls.crt"]).names
    assert secret(folder) == new, "the next `swarm k8s secrets` prints the same"
    assert "nats-server --signal reload=/run/nats/nats.pid" in documented(3)
    for server in servers:
        server.mount("nats-tls", new)
        await asyncio.to_thread(server.reload)
        await until_heard(at_work[-1], heard, server.name.encode())

    # 4. Look.
    after = [await asyncio.to_thread(presented_until, server) for server in servers]
    assert all(ends - time.time() > 364 * 86_400 - 3600 for ends in after)
    assert all(each.is_connected for each in at_work) and not lost, lost
    newcomer = await client(servers[0])
    for each in (*at_work, newcomer):
        await each.close()


async def test_a_new_authority_takes_three_rounds_in_which_who_knows_both_is_always_let_in(folder: Path, tmp_path: Path) -> None:
    typed = re.findall(r"(?:^    \S.*\n)+", SECTION.partition("A new **authority**")[2], re.MULTILINE)
    blocks = [each for each in typed if "swarm k8s secrets" in each]  # another restarts the services
    old, both, new = tmp_path / "old.crt", tmp_path / "both.crt", folder / "keys/new/ca.crt"
    old.write_text((folder / "keys/ca.crt").read_text())
    server = RenderedServer(render("cluster-one-server"), tmp_path / "nats-0")
    server.mount("nats-accounts", {"accounts.conf": (folder / "accounts.conf").read_text()})
    server.mount("nats-tls", secret(folder))
    server.start()

    async def is_trusted(authority: Path) -> bool:
        try:
            client = await connect(
                server.url, name="x", timeout_s=5.0, key_file=str(folder / "keys/operator/swarm.nk"), ca_file=str(authority)
            )
        except AccessDenied:
            return False
        await client.close()
        return True

    try:
        rounds = []
        for commands in blocks:
            files = await asyncio.to_thread(apply, commands, folder)
            if not both.exists():
                both.write_text(files["ca.crt"])
            server.mount("nats-tls", files)
            await asyncio.to_thread(server.reload)
            rounds.append([await is_trusted(each) for each in (old, both, new)])
    finally:
        server.end()
    assert rounds == [[True, True, False], [False, True, True], [False, True, True]]


def test_cert_manager_makes_the_secret_that_the_servers_mount_for_their_names_and_renews_it_before_the_alert() -> None:
    objects = render("cluster-cert-manager")
    certificates = {each["spec"]["secretName"]: each["spec"] for each in with_kind(objects, "Certificate")}
    issuers = {each["metadata"]["name"]: each["spec"] for each in with_kind(objects, "Issuer")}
    server, authority = certificates["nats-server-tls"], certificates["nats-authority"]
    assert issuers[server["issuerRef"]["name"]] == {"ca": {"secretName": "nats-authority"}}
    assert issuers[authority["issuerRef"]["name"]] == {"selfSigned": {}} and authority["isCA"]
    assert [*server["dnsNames"], *server["ipAddresses"]] == server_names("swarm", ())
    assert {"server auth", "client auth"} <= set(server["usages"])
    rules = (K8S / "components/monitoring/rules/swarm.yaml").read_text()
    warned = re.search(r"swarm_certificate_expiry_timestamp_seconds - time\(\)\)\s+< (\d+) \* 86400", rules)
    assert warned is not None and int(server["renewBefore"].removesuffix("h")) > int(warned[1]) * 24
    for workload in workloads(objects):
        for volume in pod_of(workload)["volumes"]:
            if volume["name"] == "ca":
                (source,) = volume["projected"]["sources"]
                assert source["secret"] == {"name": "nats-server-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]}

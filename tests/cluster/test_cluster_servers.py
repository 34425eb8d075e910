"""The cluster overlay's servers and operators as real processes under a cluster's own controllers,
with the Secrets that `swarm k8s secrets` prints: they form one cluster, take a new certificate and
a new node while they run, and nothing restarts. Pods with models run by word alone.

The tests go on from where the one before left the cluster.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cryptography import x509

from tests.cluster.cluster import NAMESPACE, Cluster, component_of, pods_expected
from tests.cluster.swarm import READY_S, Swarm, run_swarm
from tests.cluster.test_cluster_changes import four_gpus_each
from tests.cluster.test_cluster_secrets import swarm as swarm_k8s
from tests.k8s.manifests import Object

REAL = ("nats", "operator")
NODES = "alpha,beta,gamma"
SERVERS = ("nats-0", "nats-1", "nats-2")
TOLD_S = 240.0
"""For a changed Secret to be in the pods and the servers to have reloaded."""

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


class Servers:
    """The swarm, and the keys that its operator keeps."""

    def __init__(self, swarm: Swarm, keys: Path) -> None:
        self.swarm = swarm
        self.keys = keys

    def apply_secrets(self, nodes: str) -> None:
        """`swarm k8s secrets | kubectl apply`, as docs/kubernetes-start.md has it."""
        made = swarm_k8s(self.swarm.cluster, "secrets", "--nodes", nodes, "--keys", str(self.keys))
        assert made.returncode == 0, made.stderr
        self.swarm.cluster.kubectl("apply", "--server-side", "--filename=-", given=made.stdout)

    def apply(self) -> None:
        """The overlay as it is now, until every pod of it is ready."""
        self.swarm.cluster.until_all_ready(pods_expected(self.swarm.apply()), READY_S)

    def execute(self, node: str, command: str) -> CompletedProcess[str]:
        """A command in the pod for people of a node, or of the swarm."""
        name = next(each["metadata"]["name"] for each in self.swarm.cluster.pods(component="operator") if named(each, node))
        return self.swarm.container(name).execute(shlex.split(command), timeout_s=120)

    def until_succeeds(self, node: str, command: str) -> str:
        """Return what it printed once it ended with 0."""
        deadline = time.monotonic() + READY_S
        while (done := self.execute(node, command)).returncode:
            assert time.monotonic() < deadline, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def pods(self) -> dict[str, tuple[str, int]]:
        """Each server's uid, and how often its containers were started again."""
        return {
            each["metadata"]["name"]: (
                each["metadata"]["uid"],
                sum(container["restartCount"] for container in each["status"]["containerStatuses"]),
            )
            for each in self.swarm.cluster.pods(component="nats")
        }

    def reloads(self) -> list[int]:
        """Of each server, by its own log."""
        logs = [self.swarm.processes.container(each, "nats").log for each in SERVERS]
        return [log.read_text(errors="replace").count("Reloaded server configuration") for log in logs]


def named(pod: Object, node: str) -> bool:
    return str(pod["metadata"]["name"]).startswith(f"{node}-operator-")


@pytest.fixture(scope="module")
def servers(whole_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    with run_swarm(whole_cluster, folder, overlay="cluster") as swarm:
        machines = whole_cluster.machines

        def run(pod: Object) -> None:
            (swarm.processes.run if component_of(pod) in REAL else machines.by_word)(pod)

        machines.run = run
        machines.add(*four_gpus_each(4))
        whole_cluster.kubectl("create", "namespace", NAMESPACE)
        yield Servers(swarm, folder / "keys")


def test_apply_makes_three_servers_one_cluster_and_the_pods_for_people_report_that_all_is_well(servers: Servers) -> None:
    servers.apply_secrets(NODES)
    servers.apply()
    for node, more in (("alpha", ""), ("gamma", ""), ("swarm", "--plane swarm")):
        shown = servers.until_succeeds(node, f"swarm nats report {more}")
        assert "3/3" in shown and "2/3" not in shown, shown


def test_a_new_certificate_is_served_by_every_server_and_nothing_restarts(servers: Servers) -> None:
    before, reloads = servers.pods(), servers.reloads()
    shutil.move(servers.keys / "tls.key", servers.keys / "old.key")
    old = (servers.keys / "tls.crt").read_text()
    servers.apply_secrets(NODES)
    assert (servers.keys / "tls.crt").read_text() != old
    servers.swarm.until(lambda: all(now >= was + 2 for now, was in zip(servers.reloads(), reloads, strict=True)), "reloads", TOLD_S)
    expires = x509.load_pem_x509_certificate((servers.keys / "tls.crt").read_bytes()).not_valid_after_utc.timestamp()
    for server in SERVERS:
        _, page = servers.swarm.container(server).get("/varz", "monitor")
        assert datetime.fromisoformat(json.loads(page)["tls_cert_not_after"]).timestamp() == expires, server
    assert servers.pods() == before
    servers.until_succeeds("alpha", "swarm nats report")


def test_a_fourth_node_is_let_in_by_servers_that_go_on_running(servers: Servers) -> None:
    before = servers.pods()
    _add_delta(servers.swarm.overlay)
    servers.apply_secrets(f"{NODES},delta")
    servers.apply()
    assert "NODE_DELTA_ROLLOUTS" in servers.until_succeeds("delta", "swarm nats report")
    assert servers.pods() == before
    servers.until_succeeds("alpha", "swarm nats report")


def _add_delta(overlay: Path) -> None:
    """A node after the pattern of alpha, in a copy of the tree's overlay."""
    shutil.copytree(overlay / "nodes" / "alpha", overlay / "nodes" / "delta")
    for file in (overlay / "nodes" / "delta").iterdir():
        file.write_text(file.read_text().replace("alpha", "delta").replace("ALPHA", "DELTA"))
    top = overlay / "kustomization.yaml"
    top.write_text(top.read_text().replace("  - nodes/gamma\n", "  - nodes/gamma\n  - nodes/delta\n"))

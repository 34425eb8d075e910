"""What `swarm k8s check` gives as the remedy for an object that is missing: a command that makes
it. Those for objects made by hand are the commands of docs/kubernetes-change.md.
"""

from __future__ import annotations

import base64
import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from shared.identity.keys import new_seed
from swarm_cli.k8s import certificates
from swarm_cli.k8s.check.cluster import Cluster
from swarm_cli.k8s.check.command import findings
from swarm_cli.k8s.check.overlay import Overlay
from swarm_cli.k8s.secret_objects import expected
from tests.k8s.cluster_shapes import Listed, named
from tests.k8s.manifests import kubernetes_pages, pod_of, render, workloads

NOW = datetime.now(UTC)
PULL = "imagePullSecrets"
SEED, SIGNING_SEED = new_seed().decode(), new_seed().decode()


def told(objects: list[dict[str, Any]], listed: Listed) -> list[str]:
    found = [str(each) for each in findings(Overlay(objects), Cluster(listed), NOW)]
    return [line for line in found if "Secret" in line or "ConfigMap" in line]


def overlay_of(variant: str) -> list[dict[str, Any]]:
    return copy.deepcopy([each for each in render(variant) if each])


def secret(name: str, **entries: str) -> dict[str, Any]:
    return named("Secret", name, data={key: base64.b64encode(text.encode()).decode() for key, text in entries.items()})


def of_delta(**changed: str) -> list[dict[str, Any]]:
    authority = certificates.authority(certificates.new_key(), "swarm-nats-ca", NOW)
    entries = {"url": "tls://swarm.example.org:4222", "swarm.nk": SEED, "ca.crt": authority} | changed
    given = {key: text for key, text in entries.items() if text}
    return [secret("delta-swarm", **given), secret("delta-signing", **{"node.nk": SIGNING_SEED})]


def documented(command: str) -> bool:
    page = kubernetes_pages()
    return command.replace("HOST", "swarm.example.org") in page


BY_HAND = 'make it by hand (docs/kubernetes-change.md, "Join from outside the cluster")'


def test_the_page_has_the_section_that_remedies_name() -> None:
    assert (
        "\n## Join from outside the cluster\n" in kubernetes_pages()
        or "\n### Join from outside the cluster\n" in kubernetes_pages()
    )


def command_in(line: str) -> str:
    return line.split("`")[1]


def test_what_a_node_needs_to_join_is_made_as_the_page_says(cluster: Listed) -> None:
    cluster["secrets"] = []
    lines = told(overlay_of("joined"), cluster)
    assert [line.split(" are missing")[0] for line in lines] == ["stops  Secrets delta-signing, delta-swarm"]
    assert all(line.endswith(BY_HAND) for line in lines), lines
    cluster["secrets"] = of_delta()
    assert told(overlay_of("joined"), cluster) == []


def test_what_leaf_servers_need_is_made_as_the_page_says_and_the_keys_by_swarm_k8s_secrets(cluster: Listed) -> None:
    cluster["secrets"] = cluster["configmaps"] = []
    lines = {line.split(" missing")[0].split("  ")[1]: line for line in told(overlay_of("joined-leaf"), cluster)}
    by_hand = [lines[each] for each in ("Secret nats-hub-keys is", "ConfigMap nats-hub is")]
    assert all(line.endswith(BY_HAND) for line in by_hand), by_hand
    assert "CreateContainerConfigError" in by_hand[0] and "ContainerCreating" in by_hand[1]
    assert lines["Secret nats-accounts is"].endswith(BY_HAND), "accounts that name the hub"
    made = {each.name for each in expected(["delta"])}
    for line in (each for each in lines.values() if "swarm k8s secrets" in each):
        names = line.split("  ")[1].split(" ", 1)[1].split(" and ")[0].removesuffix(" is missing,").split(", ")
        assert set(names) <= made, line
    assert "swarm k8s secrets --nodes" in lines["ConfigMap nats-ca is"] and len(lines) == 5, list(lines)


def test_a_missing_pull_secret_is_made_by_docker_registry_and_keeps_images_from_being_pulled(cluster: Listed) -> None:
    objects = overlay_of("cluster")
    for each in workloads(objects):
        pod_of(each)[PULL] = [{"name": "swarm-registry"}]
    (line,) = told(objects, cluster)
    assert line.startswith("stops  Secret swarm-registry is missing, and pods stay in ErrImagePull or ImagePullBackOff: ")
    assert documented(command_in(line).split(" --")[0]) and "--docker-server=" in line and "k8s secrets" not in line


def test_an_object_that_nothing_in_swarm_makes_is_told_as_such(cluster: Listed) -> None:
    objects = overlay_of("cluster")
    reads = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "tracker", "key": "token"}}}
    pod_of(workloads(objects)[0])["containers"][0].setdefault("env", []).append(reads)
    (line,) = told(objects, cluster)
    assert line.startswith("stops  Secret tracker is missing, and containers stay in CreateContainerConfigError: nothing in Swarm")
    assert command_in(line) == "kubectl -n swarm create secret generic tracker --from-file=token=FILE"


def test_what_cert_manager_makes_when_the_overlay_is_applied_does_not_stop_it(cluster: Listed) -> None:
    cluster["secrets"] = [each for each in cluster["secrets"] if each["metadata"]["name"] != "nats-server-tls"]
    (line,) = told(overlay_of("cluster-cert-manager"), cluster)
    assert line.startswith("note   Secret nats-server-tls is missing, and cert-manager makes it")


@pytest.mark.parametrize(
    ("changed", "stops", "words"),
    [
        (
            {"url": ""},
            True,
            ["no entry url, which delta-verifier reads", "write url with `kubectl -n swarm edit secret delta-swarm`"],
        ),
        ({"swarm.nk": ""}, True, ["no entry swarm.nk, which delta-verifier mounts", "write swarm.nk with"]),
        ({"ca.crt": certificates.new_key()}, True, ["ca.crt holds a private key", "write ca.crt with"]),
        ({"ca.crt": "nothing"}, True, ["ca.crt cannot be read", "BEGIN CERTIFICATE"]),
        ({"swarm.nk": SIGNING_SEED}, True, ["swarm.nk is the key with which a node signs (Secret delta-signing)"]),
        ({"swarm.nk": "SUNONE"}, True, ["swarm.nk is not a key", "edit secret delta-swarm"]),
        ({"url": "swarm.example.org"}, True, ["url is not a server's address"]),
        ({"url": "nats://swarm.example.org:4222"}, False, ["url begins with nats://", "demand TLS"]),
    ],
)
def test_an_entry_of_a_secret_made_by_hand_is_replaced_and_the_others_are_kept(
    changed: dict[str, str], stops: bool, words: list[str], cluster: Listed
) -> None:
    cluster["secrets"] = of_delta(**changed)
    (line,) = told(overlay_of("joined"), cluster)
    assert line.startswith("stops  Secret delta-swarm" if stops else "note   Secret delta-swarm"), line
    assert all(word in line for word in words), line
    assert "delete" not in line and "k8s secrets" not in line


def test_an_intermediate_certificate_leads_clients_to_their_authority() -> None:
    key, middle_key, server_key = (certificates.new_key() for _ in range(3))
    root = certificates.authority(key, "root", NOW)
    middle = certificates.server(middle_key, ["middle"], root, key, NOW)
    leaf = certificates.server(server_key, ["nats"], middle, middle_key, NOW)
    assert certificates.leads_to(leaf + middle, root) and certificates.leads_to(middle, root)
    assert not certificates.leads_to(leaf, root)
    assert not certificates.leads_to(leaf + middle, certificates.authority(certificates.new_key(), "root", NOW))

"""`swarm k8s check` names what would stop an overlay, in a cluster of which kubectl tells: its
rules over the rendered overlays and over hand-written objects (`cluster_shapes.py`).
"""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from swarm_cli.k8s import certificates
from swarm_cli.k8s.check.cluster import Cluster
from swarm_cli.k8s.check.command import findings
from swarm_cli.k8s.check.overlay import Overlay, quantity
from swarm_cli.k8s.check.rules import image_findings
from tests.k8s.cluster_shapes import Listed, dns_pod, machine, named, no_plugin, quota, storage_class
from tests.k8s.manifests import render

NOW = datetime.now(UTC)


def told(listed: Listed, variant: str = "cluster", **more: Any) -> list[str]:
    overlay = Overlay([each for each in render(variant) if each])
    return [str(each) for each in findings(overlay, Cluster(listed, **more), NOW)]


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def test_nothing_is_said_of_a_cluster_that_fits(cluster: Listed) -> None:
    assert [line for line in told(cluster) if "network file system" not in line] == []
    cluster["storageclasses"][0]["provisioner"] = "rook-ceph.cephfs.csi.ceph.com"
    assert told(cluster) == []


def test_volumes_of_nats_on_a_network_file_system_are_said_and_stop_nothing(cluster: Listed) -> None:
    line = only(told(cluster))
    assert line.startswith("note") and "data-nats would be on files (nfs.csi.k8s.io)" in line


def edit_secret(listed: Listed, name: str, key: str, text: str) -> None:
    found = next(each for each in listed["secrets"] if each["metadata"]["name"] == name)
    found["data"][key] = base64.b64encode(text.encode()).decode()


def trust(listed: Listed, authority: str) -> None:
    next(each for each in listed["configmaps"] if each["metadata"]["name"] == "nats-ca")["data"]["ca.crt"] = authority


def another_authority(listed: Listed) -> None:
    trust(listed, certificates.authority(certificates.new_key(), "swarm-nats-ca", NOW))


def no_authority(listed: Listed) -> None:
    trust(listed, certificates.new_key())


def without_secrets(listed: Listed) -> None:
    listed["secrets"] = [each for each in listed["secrets"] if not each["metadata"]["name"].startswith("beta-")]


def without_roster(listed: Listed) -> None:
    listed["configmaps"] = [each for each in listed["configmaps"] if each["metadata"]["name"] != "swarm-roster"]


def mistyped_key(listed: Listed) -> None:
    (accounts,) = [each for each in listed["secrets"] if each["metadata"]["name"] == "nats-accounts"]
    text = base64.b64decode(accounts["data"]["accounts.conf"]).decode()
    edit_secret(listed, "nats-accounts", "accounts.conf", re.sub(r"nkey: U\w+", "nkey: U" + "A" * 55, text, count=1))


def cut_accounts(listed: Listed) -> None:
    edit_secret(listed, "nats-accounts", "accounts.conf", "accounts {\n")


def unreadable_key(listed: Listed) -> None:
    edit_secret(listed, "gamma-trainer", "node.nk", "SUAKEYTHATISNONE")


def without_entry(listed: Listed) -> None:
    next(each for each in listed["secrets"] if each["metadata"]["name"] == "alpha-verifier")["data"].pop("swarm.nk")


def expired(listed: Listed, left: timedelta = timedelta(days=-1)) -> None:
    key, authority_key = certificates.new_key(), certificates.new_key()
    began = NOW - certificates.SERVER_LASTS + left
    authority = certificates.authority(authority_key, "ca", began)
    edit_secret(listed, "nats-server-tls", "tls.key", key)
    edit_secret(listed, "nats-server-tls", "ca.crt", authority)
    trust(listed, authority)
    edit_secret(listed, "nats-server-tls", "tls.crt", certificates.server(key, ["nats"], authority, authority_key, began))


def soon_expired(listed: Listed) -> None:
    expired(listed, timedelta(days=10))


def another_key(listed: Listed) -> None:
    edit_secret(listed, "nats-server-tls", "tls.key", certificates.new_key())


def broken_certificate(listed: Listed) -> None:
    edit_secret(listed, "nats-server-tls", "tls.crt", "no certificate")


def small_machines(listed: Listed) -> None:
    listed["nodes"] = [machine(f"gpu-{index}", gpus=2) for index in range(8)]


def few_gpus(listed: Listed) -> None:
    listed["nodes"][2] = machine("cpu-3")


def other_architecture(listed: Listed) -> None:
    for each in listed["nodes"]:
        each["metadata"]["labels"]["kubernetes.io/arch"] = "arm64"


def two_machines(listed: Listed) -> None:
    listed["nodes"] = [machine(f"gpu-{index}", gpus=8, cpus=128, memory_gi=1024) for index in range(2)]


def tainted(listed: Listed) -> None:
    for each in listed["nodes"]:
        each["spec"]["taints"] = [{"key": "team", "value": "other", "effect": "NoExecute"}]


def cordoned(listed: Listed) -> None:
    for each in listed["nodes"]:
        each["spec"]["unschedulable"] = True


def no_default_class(listed: Listed) -> None:
    listed["storageclasses"][0]["metadata"]["annotations"] = {}


def disks_only(listed: Listed) -> None:
    listed["storageclasses"] = [storage_class("gp3", "ebs.csi.aws.com", default=True)]


def dns_elsewhere(listed: Listed) -> None:
    listed["dns"] = [dns_pod("networking")]


def dns_on_machines(listed: Listed) -> None:
    listed["dns"].append(dns_pod(host_network=True, local_ip="169.254.25.10"))


def cloud_dns(listed: Listed) -> None:
    del listed["dns"][:]


def small_quota(listed: Listed) -> None:
    listed["resourcequotas"] = [quota("team", **{"requests.nvidia.com/gpu": "8", "pods": "100"})]


@pytest.mark.parametrize(
    ("change", "stops", "words"),
    [
        (without_secrets, True, ["Secrets beta-generator, beta-operator", "are missing", "swarm k8s secrets --nodes"]),
        (without_roster, True, ["ConfigMap swarm-roster is missing"]),
        (without_entry, True, ["Secret alpha-verifier has no entry swarm.nk, which alpha-verifier mounts"]),
        (unreadable_key, True, ["Secret gamma-trainer: node.nk is not a key", "put keys/ back"]),
        (cut_accounts, True, ["accounts.conf is incomplete, and no server starts"]),
        (mistyped_key, True, ["accounts.conf lists UAAAA", "which is no public key, and no server starts with it or reloads it"]),
        (expired, True, ["the certificate expired on", "no client can connect", "reload the servers"]),
        (soon_expired, False, ["the certificate expires on"]),
        (another_key, True, ["tls.key is not the key of tls.crt"]),
        (
            another_authority,
            True,
            ["nats-ca: ca.crt is another authority", "signed nats-server-tls, and no client connects"],
        ),
        (no_authority, True, ["ConfigMap nats-ca: ca.crt holds a private key"]),
        (broken_certificate, True, ["cannot be read", "BEGIN CERTIFICATE"]),
        (no_plugin, True, ["no machine that fits offers nvidia.com/gpu", "alpha-generator", "stay Pending", "device plugin"]),
        (small_machines, True, ["no machine that fits has 4 nvidia.com/gpu (the most is 2), and gamma-trainer stays Pending"]),
        (few_gpus, True, ["all pods ask for 12 nvidia.com/gpu and all machines have 8"]),
        (other_architecture, True, ["no machine has the label kubernetes.io/arch=amd64", "architecture.yaml"]),
        (two_machines, True, ["nats needs 3 machines, one per pod, but only 2 are suitable"]),
        (tainted, True, ["every machine that fits has the taint team=other:NoExecute"]),
        (cordoned, True, ["no machine that takes pods", "uncordon"]),
        (no_default_class, True, ["no default storage class", "is-default-class=true"]),
        (disks_only, True, ["ask for ReadWriteMany, which the class gp3 (ebs.csi.aws.com) refuses", "alpha-model"]),
        (dns_elsewhere, True, ["DNS is in the namespace networking", "default-deny.yaml"]),
        (dns_on_machines, True, ["DNS answers at 169.254.25.10"]),
        (cloud_dns, False, ["no pod answers DNS", "169.254.169.254"]),
        (small_quota, True, ["ResourceQuota team allows 8 requests.nvidia.com/gpu and the overlay asks for 12"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_would_stop_it_is_one_line_with_the_remedy(
    change: Callable[[Listed], None], stops: bool, words: list[str], cluster: Listed
) -> None:
    cluster["storageclasses"][0]["provisioner"] = "rook-ceph.cephfs.csi.ceph.com"
    change(cluster)
    line = only(told(cluster))
    assert line.startswith("stops " if stops else "note ") and "\n" not in line
    assert all(word in line for word in words), line


def test_a_certificate_without_the_name_by_which_pods_connect_is_told(cluster: Listed) -> None:
    cluster["storageclasses"][0]["provisioner"] = "rook-ceph.cephfs.csi.ceph.com"
    objects = copy.deepcopy([each for each in render("cluster") if each])
    for each in objects:
        if each["kind"] == "ConfigMap" and "SWARM_NATS__NODE_URL" in (each.get("data") or {}):
            each["data"]["SWARM_NATS__NODE_URL"] = "tls://nats.swarm-2.svc:4222"
    line = only([str(each) for each in findings(Overlay(objects), Cluster(cluster), NOW)])
    assert line.startswith("stops  Secret nats-server-tls: the certificate lacks the name nats.swarm-2.svc")
    assert "--namespace" in line


def test_a_runtime_class_and_a_label_that_are_missing_are_said(cluster: Listed) -> None:
    lines = [line for line in told(cluster, "cluster-gpu-operator") if line.startswith("stops")]
    assert "RuntimeClass nvidia does not exist, and no pod of alpha-generator" in lines[0] and "gpu-nvidia-operator" in lines[0]
    assert "no machine has the label nvidia.com/gpu.present=true" in lines[1] and len(lines) == 2


def test_of_what_could_not_be_read_nothing_is_said_but_that(cluster: Listed) -> None:
    cluster["storageclasses"][0]["provisioner"] = "rook-ceph.cephfs.csi.ceph.com"
    del cluster["secrets"], cluster["nodes"]
    why = {"secrets": 'secrets is forbidden: User "dev" cannot list resource "secrets"', "nodes": "forbidden"}
    lines = told(cluster, unread=why)
    assert len(lines) == 2 and all(line.startswith("note") and "could not be read" in line for line in lines)


def test_a_claim_that_is_bound_is_not_judged_by_its_class(cluster: Listed) -> None:
    disks_only(cluster)
    bound = [f"{node}-model" for node in ("alpha", "beta", "gamma")] + ["gamma-policies"]
    cluster["persistentvolumeclaims"] = [named("PersistentVolumeClaim", name, status={"phase": "Bound"}) for name in bound]
    assert told(cluster) == []


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("registry.invalid/set-by-make-images/swarm@sha256:" + "0" * 64, "no image is named yet"),
        ("registry.example.org/swarm@sha256:abc", "has an invalid digest"),
        ("registry.example.org:5000/swarm", "neither a tag nor a digest"),
        ("swarm-verifier", "no entry under `images` of the kustomization matches the image swarm-verifier"),
        ("localhost/swarm:0.1.0", "kind load docker-image"),
    ],
)
def test_an_image_that_no_registry_has_is_said(image: str, words: str) -> None:
    pod = {"containers": [{"name": "it", "image": image}]}
    each = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "it"}, "spec": {"template": {"spec": pod}}}
    assert words in only([str(found) for found in image_findings(Overlay([each]))])
    pod["containers"][0]["image"] = "registry.example.org:5000/swarm@sha256:" + "4" * 64
    assert list(image_findings(Overlay([each]))) == []


def test_quantities_are_kubernetes_own() -> None:
    said = {"250m": 0.25, "1536Mi": 1.5 * 2**30, "8": 8.0, "2e3": 2000.0, "90G": 9e10, "47920m": 47.92}
    assert {text: quantity(text) for text in said} == said
    with pytest.raises(ValueError, match="not a quantity"):
        quantity("8 GiB")

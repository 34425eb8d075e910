"""What a running swarm does when something is changed: its configuration, its nodes, its
machines.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster, component_of, is_ready, machine_of, pods_expected
from tests.cluster.machines import Machine, references
from tests.k8s.manifests import K8S, Object, build, name_of, pod_of, render, role_of, with_kind

OVERLAY = Path("overlays/cluster")


def four_gpus_each(count: int) -> list[Machine]:
    return [Machine(f"gpu-{number}", cpus=48, memory_gib=512, gpus=4) for number in range(count)]


def copied(folder: Path) -> Path:
    """The cluster overlay in a copy of the manifests, to be changed as a person does."""
    shutil.copytree(K8S, folder / "k8s")
    return folder / "k8s" / OVERLAY


def rendered(overlay: Path) -> list[Object]:
    return [each for each in yaml.safe_load_all(build(overlay)) if each]


def own_overlay(folder: Path, *arguments: str) -> list[Object]:
    """Return what `swarm k8s overlay` writes, as docs/kubernetes-change.md says."""
    command = [sys.executable, "-m", "swarm_cli", "k8s", "overlay", str(folder), *arguments]
    subprocess.run(command, cwd=K8S.parent, check=True, timeout=60)
    return rendered(folder)


def identities(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def test_a_change_of_one_nodes_configuration_rolls_that_nodes_pods_alone_on_machines_without_a_spare_gpu(
    cluster: Cluster, tmp_path: Path
) -> None:
    overlay = copied(tmp_path)
    before = rendered(overlay)
    cluster.machines.add(*four_gpus_each(3))
    cluster.apply(before)
    cluster.until_all_ready(pods_expected(before))
    others = identities([pod for name in ("beta", "gamma") for pod in cluster.pods(node=name)])
    servers, old = identities(cluster.pods(component="nats")), identities(cluster.pods(node="alpha"))

    settings = overlay / "nodes" / "alpha" / "node.toml"
    settings.write_text(settings.read_text() + "\n# a change\n")
    after = rendered(overlay)
    cluster.apply(after)
    (config,) = {name_of(each) for each in with_kind(after, "ConfigMap")} - {
        name_of(each) for each in with_kind(before, "ConfigMap")
    }

    lasting = [each for each in with_kind(after, "Deployment", "StatefulSet") if ("ConfigMap", config) in references(pod_of(each))]
    assert {role_of(each) for each in lasting} >= {"generator", "verifier", "sampler", "trainer"}

    def rolled() -> bool:
        pods = cluster.pods(node="alpha")
        new = [pod for pod in pods if ("ConfigMap", config) in references(pod["spec"])]
        return len(new) == len(pods) == pods_expected(lasting) and all(is_ready(pod) for pod in pods)

    cluster.until(rolled, f"alpha's pods are new and have {config}")
    assert not old & identities(cluster.pods(node="alpha"))
    assert others <= identities(cluster.pods()) and servers == identities(cluster.pods(component="nats"))


def test_an_overlay_outside_the_tree_is_applied_and_a_node_is_added_to_it_and_nothing_of_the_others_moves(
    cluster: Cluster, tmp_path: Path
) -> None:
    before = own_overlay(tmp_path / "ours", "--nodes", "alpha,beta,gamma")
    cluster.machines.add(*four_gpus_each(4))
    cluster.apply(before)
    cluster.until_all_ready(pods_expected(before))
    there = identities(cluster.pods())
    after = own_overlay(tmp_path / "ours", "--nodes", "delta")
    cluster.apply(after)
    cluster.until_all_ready(pods_expected(after))
    assert there < identities(cluster.pods())
    assert {component_of(pod) for pod in cluster.pods(node="delta")} >= {"generator", "verifier", "sampler", "trainer"}


@pytest.mark.parametrize("spare", [0, 1])
def test_a_drained_machines_pods_move_and_one_server_at_a_time_is_away(cluster: Cluster, spare: int) -> None:
    """With its volume on the machine, a server waits for it; a drained machine's other pods move
    when there is room.
    """
    objects = render("cluster")
    cluster.machines.add(*four_gpus_each(3 + spare))
    cluster.apply(objects)
    cluster.until_all_ready(pods_expected(objects))
    server = cluster.pods(component="nats")[0]
    machine = machine_of(server)
    moving = [pod for pod in cluster.pods() if machine_of(pod) == machine]
    cluster.kubectl(
        "drain", machine, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s", f"--pod-selector={_swarms()}"
    )
    assert not [pod for pod in cluster.pods() if machine_of(pod) == machine]

    # A second machine with a server gives no other server away while the first one's is.
    second = next(machine_of(pod) for pod in cluster.pods(component="nats") if machine_of(pod) not in ("", machine))
    only_servers = f"{_swarms()},app.kubernetes.io/component=nats"
    refused = cluster.kubectl(
        "drain",
        second,
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--timeout=10s",
        f"--pod-selector={only_servers}",
        check=False,
    )
    assert refused.returncode != 0 and "disruption budget" in refused.stderr, refused.stderr
    assert sum(is_ready(pod) for pod in cluster.pods(component="nats")) == 2

    for name in (machine, second):
        cluster.kubectl("uncordon", name)
    cluster.until_all_ready(pods_expected(objects))
    assert len(moving) >= 2 and not identities(moving) & identities(cluster.pods())
    assert len({machine_of(pod) for pod in cluster.pods(component="nats")}) == 3


def test_a_trainer_that_ended_with_78_gets_the_mended_configuration(cluster: Cluster, tmp_path: Path) -> None:
    overlay = copied(tmp_path)
    before = rendered(overlay)
    cluster.machines.add(*four_gpus_each(3))
    broken = {name_of(each) for each in with_kind(before, "ConfigMap")}

    def refuses(pod: Object) -> str | None:
        configured = {name for kind, name in references(pod["spec"]) if kind == "ConfigMap"}
        wrong = pod["metadata"]["name"].startswith("alpha-trainer") and configured <= broken | {"nats-ca", "swarm-roster"}
        return "ended with code 78: a setting is wrong" if wrong else None

    cluster.machines.why_not_ready = refuses
    cluster.apply(before)
    cluster.until(lambda: any(_fails(pod) for pod in cluster.pods(component="trainer")), "alpha's trainer fails")
    settings = overlay / "nodes" / "alpha" / "node.toml"
    settings.write_text(settings.read_text() + "\n# mended\n")
    after = rendered(overlay)
    cluster.apply(after, check=False)
    cluster.until(lambda: all(is_ready(pod) for pod in cluster.pods(component="trainer")), "alpha's trainer has the mended one")


def test_a_missing_secret_holds_its_pods_alone_and_they_start_once_it_is_made(cluster: Cluster) -> None:
    objects = render("cluster")
    cluster.machines.add(*four_gpus_each(3))
    sampler = next(each for each in with_kind(objects, "Deployment") if role_of(each) == "sampler")
    secret = next(name for kind, name in references(pod_of(sampler)) if kind == "Secret")
    cluster.apply(objects, without={secret})

    def held() -> list[Object]:
        return [pod for pod in cluster.pods() if secret in str(cluster.machines.missing(pod))]

    cluster.until(
        lambda: (
            len(cluster.pods()) == pods_expected(objects)
            and all(is_ready(pod) or pod["status"].get("phase") == "Succeeded" for pod in cluster.pods() if pod not in held())
        ),
        "all others are ready",
    )
    assert [name_of(sampler) == name_of(pod).rsplit("-", 2)[0] for pod in held()] == [True]
    cluster.kubectl("create", "secret", "generic", secret, "--namespace=swarm", "--from-literal=node.nk=a-key")
    cluster.until_all_ready(pods_expected(objects))


def _fails(pod: Object) -> bool:
    return "code 78" in str(pod["status"].get("message"))


def _swarms() -> str:
    return "app.kubernetes.io/part-of=swarm"

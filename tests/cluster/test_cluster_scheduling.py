"""Where the scheduler puts the overlays' pods, on fake machines of several shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.cluster.cluster import Cluster, component_of, gpus_of, is_ready, machine_of, pods_expected
from tests.cluster.machines import Machine
from tests.k8s.manifests import name_of, render, with_kind, workloads

TAINTED = ("nvidia.com/gpu",)
"""As GPU machines are in managed clusters."""


def four_gpus_each(count: int) -> list[Machine]:
    return [Machine(f"gpu-{number}", cpus=48, memory_gib=512, gpus=4) for number in range(count)]


def eight_and_plain() -> list[Machine]:
    big = [Machine(f"gpu-{number}", cpus=96, memory_gib=1024, gpus=8, taints=TAINTED) for number in range(2)]
    return [*big, *(Machine(f"plain-{number}", cpus=8, memory_gib=32) for number in range(3))]


SHAPES = {
    "three machines of four GPUs": four_gpus_each(3),
    "four machines of four GPUs": four_gpus_each(4),
    "two tainted machines of eight GPUs and three without": eight_and_plain(),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pod_of_the_cluster_overlay_finds_its_machine(cluster: Cluster, shape: str) -> None:
    objects = render("cluster")
    assert sum(gpus_of(each) * each["spec"].get("replicas", 1) for each in workloads(objects)) <= sum(
        machine.gpus for machine in SHAPES[shape]
    )
    cluster.machines.add(*SHAPES[shape])
    cluster.apply(objects)
    cluster.until_all_ready(pods_expected(objects))

    servers = [machine_of(pod) for pod in cluster.pods(component="nats")]
    assert len(set(servers)) == len(servers) == 3
    used: Counter[str] = Counter()
    for pod in cluster.pods():
        for container in pod["spec"]["containers"]:
            used[machine_of(pod)] += int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
    room = {machine.name: machine.gpus for machine in SHAPES[shape]}
    assert all(used[name] <= gpus for name, gpus in room.items())
    widest = max(workloads(objects), key=gpus_of)
    assert gpus_of(widest) == 4 and len({machine_of(pod) for pod in cluster.pods() if _made_by(pod, name_of(widest))}) == 1


def test_the_only_machine_with_four_gpus_goes_to_the_trainer_that_needs_it(cluster: Cluster) -> None:
    """Whoever took it before is displaced. A trainer with one GPU that was there has its disk there
    and waits, until a person gives it another (docs/kubernetes-start.md, "A cluster").
    """
    objects = render("cluster")
    ones = [Machine(f"one-{number}", cpus=16, memory_gib=128, gpus=1) for number in range(8)]
    cluster.machines.add(*ones, Machine("four", cpus=48, memory_gib=512, gpus=4))
    cluster.apply(objects)

    def has_it() -> bool:
        (pod,) = cluster.pods(node="gamma", component="trainer") or [None]
        return pod is not None and is_ready(pod) and machine_of(pod) == "four"

    cluster.until(has_it, "gamma's trainer has the machine with four GPUs")

    def all_ready() -> bool:
        pods = cluster.pods()
        for name in [name_of(pod) for pod in pods if "volume node affinity conflict" in str(pod["status"].get("conditions"))]:
            cluster.kubectl("--namespace=swarm", "delete", "--wait=false", f"pvc/var-{name}", f"pod/{name}", check=False)
        return len(pods) == pods_expected(objects) and all(is_ready(pod) for pod in pods)

    cluster.until(all_ready, "all others are ready")
    assert has_it()


@pytest.mark.parametrize("size", ["a laptop", "three small machines"])
def test_the_single_box_overlay_fits_a_laptop(cluster: Cluster, size: str) -> None:
    objects = render("single-box")
    laptop = [Machine("laptop", cpus=4, memory_gib=8)]
    small = [Machine(f"small-{number}", cpus=2, memory_gib=4) for number in range(3)]
    cluster.machines.add(*(laptop if size == "a laptop" else small))
    cluster.apply(objects)
    cluster.until_all_ready(pods_expected(objects))


def test_two_machines_leave_the_third_server_pending_and_the_scheduler_says_why(cluster: Cluster) -> None:
    objects = render("cluster")
    big = [Machine(f"gpu-{number}", cpus=96, memory_gib=1024, gpus=8) for number in range(2)]
    cluster.machines.add(*big, Machine("other", cpus=32, memory_gib=64, taints=("somebody-elses",)))
    cluster.apply(objects)
    cluster.until(lambda: any("anti-affinity" in words for words in cluster.warnings()), "the scheduler names the affinity")
    cluster.until(lambda: sum(is_ready(pod) for pod in cluster.pods(component="nats")) == 2, "two servers are ready")
    third = next(pod for pod in cluster.pods(component="nats") if not is_ready(pod))
    assert not machine_of(third) and len({machine_of(pod) for pod in cluster.pods(component="nats")}) == 3


def test_without_the_class_nvidia_gpu_pods_come_with_the_first_component_and_the_second_says_what_is_missing(
    cluster: Cluster,
) -> None:
    discovered = {"nvidia.com/gpu.present": "true"}
    cluster.machines.add(*(replace(machine, labels=discovered) for machine in four_gpus_each(4)))
    objects = render("cluster-gpu-operator")
    cluster.apply(objects)
    wanted = 'RuntimeClass "nvidia" not found'
    cluster.until(lambda: any(wanted in words for words in cluster.warnings()), "the controllers say that the class is missing")
    assert not {"generator", "trainer"} & {component_of(pod) for pod in cluster.pods()}
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"}
    if not cluster.api.get("RuntimeClass", "nvidia"):
        cluster.api.create(runtime)
    try:
        cluster.kubectl("rollout", "restart", "--namespace=swarm", "deployment,statefulset")
        cluster.until_all_ready(pods_expected(objects))
    finally:
        cluster.api.delete("RuntimeClass", "nvidia")


def test_without_the_operators_of_prometheus_and_keda_the_rest_is_whole_and_apply_names_them(cluster: Cluster) -> None:
    objects = render("cluster-everything")
    foreign = [
        each for each in objects if "." in (group := each["apiVersion"].rpartition("/")[0]) and not group.endswith(".k8s.io")
    ]
    assert {each["kind"] for each in foreign} >= {"PodMonitor", "ScaledObject"}
    if {each["apiVersion"] for each in foreign} & cluster.api.versions():
        pytest.skip("this cluster has Prometheus's operator or KEDA")
    cluster.machines.add(*four_gpus_each(4))
    done = cluster.apply(objects, check=False)
    assert done.returncode == 1
    for each in foreign:
        assert f'no matches for kind "{each["kind"]}"' in done.stderr, done.stderr
    assert "ensure CRDs are installed first" in done.stderr
    cluster.until_all_ready(pods_expected(objects))
    there = {name_of(each) for kind in ("Deployment", "StatefulSet", "Job") for each in cluster.api.listed(kind, "swarm")}
    assert there == {name_of(each) for each in workloads(objects)}
    assert len(cluster.api.listed("ConfigMap", "swarm")) >= len(with_kind(objects, "ConfigMap"))


def _made_by(pod: dict[str, object], workload: str) -> bool:
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    return str(metadata["name"]).startswith(workload)

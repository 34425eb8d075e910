"""A drained machine with real processes on it: two nodes and three NATS servers, whose pods end,
start elsewhere where their volumes may go, and train further.

The swarm is the single-box overlay with `nats-cluster`, with policies through NATS and verifiers
without a volume, as in the cluster overlay; alpha's trainer has a volume that can move, beta's has
one that stays on its machine, and so have the servers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, component_of, is_ready, machine_of, pods_expected
from tests.cluster.machines import MOVABLE, Machine
from tests.cluster.swarm import READY_S, STEP_S, Swarm, run_swarm
from tests.k8s.manifests import Object, name_of

DRAINED = "one"
STORAGE_PATCH = f"""
patches:
  - target: {{kind: StatefulSet, name: alpha-trainer}}
    patch: |-
      - {{op: add, path: /spec/volumeClaimTemplates/0/spec/storageClassName, value: {MOVABLE}}}
"""

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


@pytest.fixture(scope="module")
def swarm(whole_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """It trains; both trainers and one server are on the machine `one`."""
    with run_swarm(whole_cluster, tmp_path_factory.mktemp("drain")) as swarm:
        for_several_machines(swarm.overlay)
        machines = whole_cluster.machines
        machines.add(Machine(DRAINED, cpus=16, memory_gib=64))
        objects = swarm.apply()
        whole_cluster.until(lambda: len(placed(whole_cluster)) == pods_expected(objects) - 2, "all but two servers are placed")
        machines.add(Machine("two", cpus=16, memory_gib=64), Machine("three", cpus=16, memory_gib=64))

        def trains() -> bool:
            pods = whole_cluster.pods()
            ready = len(pods) == pods_expected(objects) and all(is_ready(pod) for pod in pods)
            return ready and all(swarm.steps(node) >= 1 for node in ("alpha", "beta"))

        swarm.until(trains, "all pods are ready and both nodes train", READY_S + STEP_S)
        yield swarm


def for_several_machines(overlay: Path) -> None:
    """The lines of a kustomization that docs/kubernetes-change.md has, changed as by a person."""
    top, every = overlay / "kustomization.yaml", overlay / "every-node" / "kustomization.yaml"
    component = "  - ../../components/restricted\n"
    top.write_text(top.read_text().replace(component, "  - ../../components/nats-cluster\n" + component) + STORAGE_PATCH)
    kept = [line for line in every.read_text().splitlines() if not line.endswith(("/policy-volume", "/verifier-volume"))]
    every.write_text("\n".join(kept[: kept.index("patches:")]) + "\n")


def placed(cluster: Cluster) -> list[Object]:
    return [pod for pod in cluster.pods() if machine_of(pod)]


def records(swarm: Swarm, node: str) -> str:
    """Return what the node's trainer wrote of its steps, a line each."""
    (file,) = swarm.processes.claimed(f"var-{node}-trainer-0").glob(f"runs/*/{node}/metrics.jsonl")
    return file.read_text()


def assert_each_step_once(swarm: Swarm, node: str) -> None:
    numbers = [json.loads(line)["step"] for line in records(swarm, node).splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))


def drain(cluster: Cluster, machine: str, *more: str) -> tuple[int, str, int]:
    """`kubectl drain` as docs/kubernetes-change.md has it: its code, its words, and the fewest
    servers that were ready meanwhile.
    """
    command = ["drain", machine, "--ignore-daemonsets", "--delete-emptydir-data", *more]
    fewest = 3
    with ThreadPoolExecutor(1) as beside:
        drained = beside.submit(cluster.kubectl, *command, check=False)
        while not drained.done():
            fewest = min(fewest, sum(is_ready(pod) for pod in cluster.pods(component="nats")))
            time.sleep(0.3)
    done = drained.result()
    return done.returncode, done.stdout + done.stderr, fewest


def test_a_drained_machines_pods_end_in_order_and_what_can_move_trains_elsewhere(swarm: Swarm) -> None:
    cluster = swarm.cluster
    here = {name_of(pod): component_of(pod) for pod in placed(cluster) if machine_of(pod) == DRAINED}
    assert {"alpha-trainer-0", "beta-trainer-0"} <= set(here) and list(here.values()).count("nats") == 1
    grace = {name_of(pod): pod["spec"]["terminationGracePeriodSeconds"] for pod in placed(cluster)}
    server = swarm.container(next(name for name, role in here.items() if role == "nats"))

    code, words, fewest = drain(cluster, DRAINED, "--timeout=170s")
    before = {node: records(swarm, node) for node in ("alpha", "beta")}
    assert code == 0 and fewest == 2, words
    assert not [pod for pod in placed(cluster) if machine_of(pod) == DRAINED]

    left = {each.pod: each for each in swarm.processes.left if each.machine == DRAINED}
    assert set(left) == set(here)
    for name, each in left.items():
        assert (each.ended.code, each.ended.killed, each.ended.hook_problem) == (0, False, None), each
        assert each.ended.seconds < grace[name]
    signals = re.findall(r'Trapped "(.+)" signal', server.log.read_text())
    assert signals == ["user defined signal 2", "terminated"]  # the preStop command's came first
    print({name: round(each.ended.seconds, 1) for name, each in left.items()})

    steps = before["alpha"].count("\n")
    swarm.until(lambda: records(swarm, "alpha").count("\n") >= steps + 2, "alpha trains elsewhere", READY_S)
    assert records(swarm, "alpha").startswith(before["alpha"]) and steps >= 1
    assert_each_step_once(swarm, "alpha")
    assert machine_of(swarm.pod("alpha", "trainer")) not in ("", DRAINED)


def test_what_has_its_volume_there_waits_and_the_budget_keeps_the_other_servers(swarm: Swarm) -> None:
    cluster = swarm.cluster
    (waits,) = [pod for pod in cluster.pods(component="nats") if not machine_of(pod)]

    def others_ready() -> bool:
        stay = {name_of(waits), "beta-trainer-0"}
        return all(is_ready(pod) == (name_of(pod) not in stay) for pod in cluster.pods())

    swarm.until(others_ready, "all are ready but the two whose volumes are on the drained machine", READY_S)
    for pod in (waits, swarm.pod("beta", "trainer")):
        assert "volume node affinity conflict" in str(pod["status"]["conditions"]), pod["status"]
    servers = "app.kubernetes.io/part-of=swarm,app.kubernetes.io/component=nats"
    code, words, fewest = drain(cluster, "two", "--timeout=10s", f"--pod-selector={servers}")
    assert code != 0 and "disruption budget" in words and fewest == 2, words
    cluster.kubectl("uncordon", "two")
    taken = swarm.steps("alpha")
    swarm.until(lambda: swarm.steps("alpha") > taken, "alpha trains with two servers of three", STEP_S)


def test_a_machine_that_is_back_gets_what_waited_for_it_and_its_trainer_goes_on(swarm: Swarm) -> None:
    cluster = swarm.cluster
    before = records(swarm, "beta")
    cluster.kubectl("uncordon", DRAINED)
    swarm.until(lambda: all(is_ready(pod) for pod in cluster.pods()), "all pods are ready", READY_S)
    assert machine_of(swarm.pod("beta", "trainer")) == DRAINED
    assert len({machine_of(pod) for pod in cluster.pods(component="nats")}) == 3
    steps = before.count("\n")
    swarm.until(lambda: records(swarm, "beta").count("\n") >= steps + 2, "beta trains again", STEP_S)
    assert records(swarm, "beta").startswith(before) and steps >= 1
    assert_each_step_once(swarm, "beta")

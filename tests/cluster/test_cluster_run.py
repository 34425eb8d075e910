"""The single-box overlay under a cluster's own controllers, with its containers as real processes:
what is applied becomes a swarm that trains, and stays one through what clusters do.

The tests go on from where the one before left the swarm.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import NAMESPACE, Cluster, is_ready, pods_expected
from tests.cluster.machines import Machine
from tests.cluster.swarm import READY_S, STEP_S, Swarm, run_swarm
from tests.k8s.manifests import Object

BROKEN = "\n[no_such_section]\nx = 1\n"

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


@pytest.fixture(scope="module")
def swarm(whole_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with run_swarm(whole_cluster, tmp_path_factory.mktemp("swarm")) as swarm:
        whole_cluster.machines.add(Machine("laptop", cpus=8, memory_gib=32))
        yield swarm


def restarts(pod: Object) -> int:
    return sum(each["restartCount"] for each in pod["status"].get("containerStatuses", []))


def last_code(pod: Object) -> int | None:
    codes = [each.get("lastState", {}).get("terminated", {}).get("exitCode") for each in pod["status"].get("containerStatuses", [])]
    return codes[0] if codes else None


def test_apply_leads_to_a_swarm_that_takes_a_training_step(swarm: Swarm) -> None:
    objects = swarm.apply()
    swarm.cluster.machines.problems.clear()

    def all_ready() -> bool:
        pods = swarm.cluster.pods()
        return len(pods) == pods_expected(objects) and all(is_ready(pod) for pod in pods)

    swarm.until(all_ready, "all pods are ready", READY_S)
    swarm.until(lambda: swarm.steps("alpha") >= 1 and swarm.steps("beta") >= 1, "both trainers took a step", STEP_S)


def test_a_killed_container_is_started_again_in_its_pod_and_gets_ready(swarm: Swarm) -> None:
    before = swarm.pod("alpha", "verifier")
    os.kill(swarm.container(before["metadata"]["name"]).pid, signal.SIGKILL)
    swarm.until(lambda: restarts(swarm.pod("alpha", "verifier")) == 1, "it is started again", READY_S)
    swarm.until(lambda: is_ready(swarm.pod("alpha", "verifier")), "it is ready again", READY_S)
    after = swarm.pod("alpha", "verifier")
    assert after["metadata"]["uid"] == before["metadata"]["uid"] and last_code(after) == 128 + signal.SIGKILL


def test_three_generators_instead_of_one_are_two_new_pods_that_all_work(swarm: Swarm) -> None:
    before = swarm.pod("beta", "generator")["metadata"]["name"]
    swarm.cluster.kubectl("scale", f"--namespace={NAMESPACE}", "deployment/beta-generator", "--replicas=3")

    def names() -> list[str]:
        return [pod["metadata"]["name"] for pod in swarm.cluster.pods(node="beta", component="generator") if is_ready(pod)]

    swarm.until(lambda: len(names()) == 3, "three are ready", READY_S)
    assert before in names()
    swarm.until(
        lambda: all(swarm.metric(name, "swarm_rollouts_generated_total") >= 1 for name in names()),
        "each has sampled groups",
        STEP_S,
    )
    swarm.cluster.kubectl("scale", f"--namespace={NAMESPACE}", "deployment/beta-generator", "--replicas=1")
    swarm.until(lambda: len(swarm.cluster.pods(node="beta", component="generator")) == 1, "two left", READY_S)


def test_a_trainer_whose_configuration_is_wrong_ends_with_78_and_the_mended_one_is_applied_over_it(swarm: Swarm) -> None:
    settings = swarm.overlay / "nodes" / "alpha" / "node.toml"
    right, pod = settings.read_text(), swarm.pod("alpha", "trainer")["metadata"]["uid"]
    settings.write_text(right + BROKEN)
    swarm.apply()
    swarm.until(lambda: 78 in map(last_code, swarm.cluster.pods(node="alpha", component="trainer")), "it ended with 78", READY_S)
    # A container that is just being started again has said nothing yet.
    swarm.until(lambda: "no_such_section" in swarm.container("alpha-trainer-0").words(), "it says which setting", READY_S)
    settings.write_text(right)
    swarm.apply()

    def mended() -> bool:
        pods = swarm.cluster.pods(node="alpha")
        return len(pods) == 5 and all(is_ready(each) for each in pods)

    swarm.until(mended, "alpha is ready again", READY_S)
    assert swarm.pod("alpha", "trainer")["metadata"]["uid"] != pod
    swarm.until(lambda: swarm.steps("alpha") >= 1, "its trainer goes on", STEP_S)


def test_a_rollout_restart_replaces_every_pod_and_training_goes_on_from_its_checkpoint(swarm: Swarm) -> None:
    old = {pod["metadata"]["uid"] for pod in swarm.cluster.pods()}
    swarm.until(lambda: swarm.steps("beta") >= 1, "beta has something to lose", STEP_S)
    version = swarm.metric("beta-trainer-0", "swarm_policy_version")
    swarm.cluster.kubectl("rollout", "restart", f"--namespace={NAMESPACE}", "deployment,statefulset")

    def replaced() -> bool:
        pods = swarm.cluster.pods()
        return not old & {pod["metadata"]["uid"] for pod in pods} and all(is_ready(pod) for pod in pods)

    swarm.until(replaced, "every pod is new and ready", READY_S)
    swarm.until(lambda: swarm.steps("alpha") >= 1 and swarm.steps("beta") >= 1, "both go on", STEP_S)
    assert swarm.metric("beta-trainer-0", "swarm_policy_version") > version > 0

"""The single-box overlay, played with the real images: eleven containers, each as its manifest says
(see `kube`).
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.containers.conftest import ROOT
from tests.containers.kube import USER, PlayedPod, config_maps, pods, render
from tests.containers.podman import NAME, Podman, ask, figure, wait_for_page
from tests.containers.secured_pods import workload_of
from tests.k8s.test_operator_commands import PLACEHOLDERS, executed

FIRST_STEP_TIMEOUT_S = 600.0
RUN = "single-box"
"""Of its `node.toml`; the pages say `run-1`, as the cluster's do."""
PUTS_BACK = ("mv ", "tar x ")
"""Steps of a restore, for which the page has put the trainer to sleep."""
ROLES = ("nats", "generator", "verifier", "sampler", "trainer", "operator")


class Swarm:
    """The pods of the overlay, and where each answers."""

    def __init__(self, podman: Podman, played: list[PlayedPod], folder: Path, maps: list[dict[str, object]]) -> None:
        self.podman = podman
        self.pods = sorted(played, key=lambda pod: ROLES.index(pod.role))
        self._folder = folder
        self._maps = maps
        self._addresses: dict[str, str] = {}

    def start(self) -> None:
        self.podman("network", "create", NAME)
        for volume in dict.fromkeys(volume for pod in self.pods for volume in pod.volumes):
            self.podman("volume", "create", volume)
            # What fsGroup does for claims, and the kubelet for empty folders: the pod's user may
            # write.
            os.chown(self.podman.inspect(volume)["Mountpoint"], USER, USER)
        for pod in self.pods:
            manifest = self._folder / f"{pod.name}.yaml"
            manifest.write_text(yaml.safe_dump_all([*self._maps, pod.manifest]))
            self.podman("kube", "play", "--network", NAME, str(manifest), timeout_s=300)

    @property
    def probed(self) -> list[PlayedPod]:
        """All but the operators' pods, which wait for people."""
        return [pod for pod in self.pods if pod.role != "operator"]

    def with_role(self, role: str) -> list[PlayedPod]:
        return [pod for pod in self.pods if pod.role == role]

    def until(self, pods: list[PlayedPod], name: str, least: float) -> None:
        """Wait until a metric of each of these has come so far."""
        deadline = time.monotonic() + FIRST_STEP_TIMEOUT_S
        while not all(self.metric(pod, name) >= least for pod in pods):
            assert time.monotonic() < deadline, f"{name} below {least:g}\n{self.podman.logs(pods[0].container)}"
            time.sleep(1)

    def url(self, pod: PlayedPod, kind: str) -> str:
        """Address of a probe, as it is written in the manifest."""
        get = pod.probes[kind]["httpGet"]
        if pod.name not in self._addresses:
            infra = json.loads(self.podman("pod", "inspect", pod.name))["InfraContainerID"]
            self._addresses[pod.name] = self.podman.address(infra)
        return f"http://{self._addresses[pod.name]}:{get['port']}{get['path']}"

    def wait_until_started(self, pod: PlayedPod) -> float:
        """Seconds until the startup probe succeeded; it may take as long as the probe's thresholds
        allow.
        """
        probe = pod.probes["startupProbe"]
        return wait_for_page(self.url(pod, "startupProbe"), probe["failureThreshold"] * probe.get("periodSeconds", 10))

    def metric(self, pod: PlayedPod, name: str) -> float:
        """Sum of a metric's samples; 0 where it is not exported."""
        return figure(self.url(pod, "livenessProbe").replace("/livez", "/metrics"), name)

    def stop(self, pod: PlayedPod) -> float:
        """End a pod as Kubernetes does: preStop, SIGTERM, and SIGKILL after the grace period.
        Returns seconds.
        """
        started = time.monotonic()
        if pod.pre_stop:
            self.podman("exec", pod.container, *pod.pre_stop)
        self.podman("pod", "stop", "--time", str(pod.grace_s), pod.name, timeout_s=pod.grace_s + 60)
        return time.monotonic() - started


@pytest.fixture(scope="module")
def swarm(podman: Podman, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    objects = render(ROOT / "k8s/overlays/single-box")
    named = {"swarm": images["cpu"], "swarm-verifier": images["verifier"], "swarm-nats": images["nats"]}
    swarm = Swarm(podman, pods(objects, named), tmp_path_factory.mktemp("pods"), config_maps(objects))
    try:
        swarm.start()
        yield swarm
    finally:
        for pod in swarm.pods:
            podman.attempt("pod", "rm", "--force", "--time", "0", pod.name)


@pytest.fixture(scope="module")
def training(swarm: Swarm) -> Swarm:
    """The pods, once they are ready and each node has trained and follows its trainer."""
    started = time.monotonic()
    for pod in swarm.probed:
        try:
            swarm.wait_until_started(pod)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{swarm.podman.logs(pod.container)}")
        print(f"{pod.name} ready after {time.monotonic() - started:.0f} s")
    trainers, generators = swarm.with_role("trainer"), swarm.with_role("generator")
    assert len(trainers) == len(generators) == 2
    swarm.until(trainers, "swarm_trainer_steps_total", 2)
    print(f"every trainer took 2 steps after {time.monotonic() - started:.0f} s")
    swarm.until(generators, "swarm_policy_version", 1)
    print(f"every generator had a trained policy after {time.monotonic() - started:.0f} s")
    return swarm


def test_the_pods_of_a_single_box_train_and_a_persons_pod_sees_it(training: Swarm) -> None:
    for pod in training.probed:
        assert ask(training.url(pod, "livenessProbe"))[0] == 200, pod.name
    (operator,) = [pod for pod in training.pods if pod.name == "alpha-operator"]
    seen = training.podman("exec", operator.container, "swarm", "status", "--json")
    nodes = json.loads(seen)["nodes"]
    assert all(nodes[name]["step"] >= 2 for name in ("alpha", "beta")), seen


def test_every_command_that_a_page_sends_to_a_trainers_pod_runs_there_and_succeeds(training: Swarm) -> None:
    (trainer,) = [pod for pod in training.with_role("trainer") if pod.name.startswith("alpha")]
    (generator,) = [pod for pod in training.with_role("generator") if pod.name.startswith("alpha")]
    training.until([generator], "swarm_held_out_policy_version", 1)  # `--best` wants an evaluation near a checkpoint
    run_here = {**PLACEHOLDERS, "RUN": RUN}
    sent = [each for each in executed() if workload_of(each[1]) == "alpha-trainer" and not each[3].startswith(PUTS_BACK)]
    assert len(sent) >= 4
    deadline = time.monotonic() + FIRST_STEP_TIMEOUT_S
    for page, _, _, command in sent:
        typed = command.partition(" > ")[0].replace("run-1", RUN)
        words = [run_here.get(word, word) for word in shlex.split(typed)]
        while (done := training.podman.attempt("exec", trainer.container, *words)).returncode:
            assert "no evaluated checkpoint" in done.stderr and time.monotonic() < deadline, f"{page}: {typed}\n{done.stderr}"
            time.sleep(2)
        print(f"{page}: {typed}")


def test_the_pods_of_a_single_box_end_within_their_grace_periods(training: Swarm) -> None:
    # Services first: a draining server tells its clients to go elsewhere, and there is nowhere else
    # here.
    for pod in reversed(training.pods):
        seconds = training.stop(pod)
        state = training.podman.inspect(pod.container)["State"]
        print(f"{pod.name} ended after {seconds:.1f} s of {pod.grace_s} s with exit code {state['ExitCode']}")
        assert state["Status"] == "exited" and not state["OOMKilled"], state
        assert state["ExitCode"] == 0, training.podman.logs(pod.container)
        assert seconds < pod.grace_s

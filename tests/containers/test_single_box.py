"""The single-box overlay, played with the real images: eleven containers, each as its manifest says
(see `kube`).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.containers.conftest import ROOT
from tests.containers.kube import USER, PlayedPod, config_maps, pods, render
from tests.containers.podman import NAME, Podman, ask, wait_for_page

FIRST_STEP_TIMEOUT_S = 600.0
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
        page = ask(self.url(pod, "livenessProbe").replace("/livez", "/metrics"))[1]
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))

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


def test_the_pods_of_a_single_box_train_and_end_within_their_grace_periods(swarm: Swarm) -> None:
    started = time.monotonic()
    probed = [pod for pod in swarm.pods if pod.role != "operator"]  # that one waits for people
    for pod in probed:
        try:
            swarm.wait_until_started(pod)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{swarm.podman.logs(pod.container)}")
        print(f"{pod.name} ready after {time.monotonic() - started:.0f} s")
    trainers = [pod for pod in swarm.pods if pod.role == "trainer"]
    assert len(trainers) == 2
    deadline = time.monotonic() + FIRST_STEP_TIMEOUT_S
    while not all(swarm.metric(trainer, "swarm_trainer_steps_total") >= 2 for trainer in trainers):
        assert time.monotonic() < deadline, swarm.podman.logs(trainers[0].container)
        time.sleep(1)
    print(f"every trainer took 2 steps after {time.monotonic() - started:.0f} s")
    generators = [pod for pod in swarm.pods if pod.role == "generator"]
    while not all(swarm.metric(generator, "swarm_policy_version") >= 1 for generator in generators):
        assert time.monotonic() < deadline, swarm.podman.logs(trainers[0].container)
        time.sleep(1)
    print(f"every generator had a trained policy after {time.monotonic() - started:.0f} s")

    for pod in probed:
        assert ask(swarm.url(pod, "livenessProbe"))[0] == 200, pod.name

    (operator,) = [pod for pod in swarm.pods if pod.name == "alpha-operator"]
    seen = swarm.podman("exec", operator.container, "swarm", "status", "--json")
    nodes = json.loads(seen)["nodes"]
    assert all(nodes[name]["step"] >= 2 for name in ("alpha", "beta")), seen

    # Services first: a draining server tells its clients to go elsewhere, and there is nowhere else
    # here.
    for pod in reversed(swarm.pods):
        seconds = swarm.stop(pod)
        state = swarm.podman.inspect(pod.container)["State"]
        print(f"{pod.name} ended after {seconds:.1f} s of {pod.grace_s} s with exit code {state['ExitCode']}")
        assert state["Status"] == "exited" and not state["OOMKilled"], state
        assert state["ExitCode"] == 0, swarm.podman.logs(pod.container)
        assert seconds < pod.grace_s

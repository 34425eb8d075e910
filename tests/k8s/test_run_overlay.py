"""The manifests are really run: every container of the single-box overlay, as a process with
exactly what its manifest gives it.

Each runs in namespaces of its own (see `container_init`): its image's root file system, read-only;
its environment and nothing of this machine's; its ConfigMaps and volumes; its user without
capabilities; its pod's address and the names of the services. Not emulated: seccomp, cgroup limits
and network policies (`tests/containers` runs the real images).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from tests.k8s.images import by_image, image_name, read_stages
from tests.k8s.kubelet import Ended, Kubelet, Running
from tests.k8s.manifests import REPOSITORY, ROLES, every_container, render
from tests.k8s.pod_network import PodNetwork
from tests.k8s.pods import command_of, hosts, pods_of

STARTED_S = 600.0
"""On a machine that does much else; the probes themselves allow more."""
FIRST_STEP_S = 300.0

OBJECTS_OF = "single-box"

pytestmark = pytest.mark.timeout(1800)


def why_not() -> str | None:
    """Why pods cannot be run here, None when they can."""
    if not sys.platform.startswith("linux") or os.getuid() != 0:
        return "running the manifests needs namespaces and mounts: Linux, as root"
    missing = [tool for tool in ("ip", "mount", "nsenter", "setpriv", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian's packages iproute2, util-linux)"
    layers = "lowerdir=/etc,upperdir=/mnt/u,workdir=/mnt/w"
    trial = f"mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w /mnt/o && mount -t overlay o -o {layers} /mnt/o"
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "sh", "-c", trial], capture_output=True, text=True, check=False
    )
    return f"this machine does not allow namespaces or overlay mounts: {done.stderr.strip()}" if done.returncode else None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """All pods of the overlay, started at the same time as `kubectl apply` would."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    objects = render(OBJECTS_OF)
    stages = read_stages(REPOSITORY / "Dockerfile")
    network = PodNetwork(f"sw{os.getpid()}")
    started: dict[str, Running] = {}
    try:
        pods = {pod.name: (pod, network.add_pod(pod.name)) for pod in pods_of(objects)}
        names = hosts(pods, objects)
        kubelet = Kubelet(tmp_path_factory.mktemp("pods"), network, objects, stages, by_image(stages))
        for name, (pod, address) in pods.items():
            started[name] = kubelet.start(pod, address, names)
        for container in started.values():
            container.watch()
        yield started
    finally:
        for container in started.values():
            container.kill()
        network.close()


def wait_for(running: dict[str, Running], holds: dict[str, bool], what: str, deadline: float) -> None:
    for container in running.values():
        code = container.process.poll()
        if code is not None or container.complaints:
            pytest.fail(f"{container.pod.name} ended with {code} {container.complaints} before {what}:\n{container.words()}")
    if time.monotonic() > deadline:
        late = [name for name, held in holds.items() if not held]
        words = "\n".join(f"--- {name}\n{running[name].words()}" for name in late)
        pytest.fail(f"not in time: {what}: {', '.join(late)}\n{words}")
    time.sleep(0.2)


def metric(container: Running, name: str) -> float:
    _, page = container.get("/metrics", "metrics")
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))


def with_role(running: dict[str, Running], role: str) -> list[Running]:
    return [container for container in running.values() if container.pod.role == role]


@pytest.mark.parametrize("variant", ["single-box", "cluster"])
def test_commands_of_manifests_are_those_of_the_images(variant: str) -> None:
    images = by_image(read_stages(REPOSITORY / "Dockerfile"))
    for _, container in every_container(render(variant)):
        name = container["name"]
        if name in ROLES:
            command = command_of(container, images["swarm"])
            assert command[0] in ("python", "torchrun") and command[-2:] == ["-m", f"services.{name}"]
        image = images.get(image_name(container["image"]))
        if image is not None and image.labels["org.opencontainers.image.title"] in ("swarm-verifier", "swarm-nats"):
            own = [*image.entrypoint, *image.command]
            assert command_of(container, image)[: len(own)] == own


@pytest.mark.slow
def test_a_manifest_that_forgets_something_is_found_out(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    objects = render(OBJECTS_OF)
    stages = read_stages(REPOSITORY / "Dockerfile")
    (sampler,) = [pod for pod in pods_of(objects) if pod.name.startswith("alpha-sampler")]
    network = PodNetwork(f"sx{os.getpid()}")
    started: list[Running] = []
    try:
        kubelet = Kubelet(tmp_path, network, objects, stages, by_image(stages))
        for number, (field, kept) in enumerate((("volumeMounts", "/var/lib/swarm"), ("envFrom", ""))):
            forgetful = deepcopy(sampler.spec)
            container = forgetful["containers"][0]
            container[field] = [each for each in container[field] if kept and each["mountPath"] != kept]
            pod = replace(sampler, name=f"forgets-{number}", spec=forgetful)
            started.append(kubelet.start(pod, network.add_pod(pod.name), "127.0.0.1 localhost\n"))
        without_volume, without_settings = ([each.process.wait(STARTED_S), each.words()] for each in started)
    finally:
        for each in started:
            each.kill()
        network.close()
    assert without_volume[0] != 0 and "/var/lib/swarm" in without_volume[1], without_volume
    assert without_settings[0] == 78, without_settings


@pytest.mark.slow
def test_every_container_starts_and_gets_ready_as_its_probes_ask(running: dict[str, Running]) -> None:
    assert {container.pod.role for container in running.values()} == {*ROLES, "nats", "operator"}
    deadline = time.monotonic() + STARTED_S
    while not all((holds := {name: container.ready for name, container in running.items()}).values()):
        wait_for(running, holds, "all are ready", deadline)
    print({name: round(container.started_s or 0, 1) for name, container in running.items()})


@pytest.mark.slow
def test_every_trainer_takes_a_step_and_foreign_groups_arrive(running: dict[str, Running]) -> None:
    deadline = time.monotonic() + FIRST_STEP_S
    while True:
        holds = {
            container.pod.name: metric(container, "swarm_trainer_steps_total") >= 1 for container in with_role(running, "trainer")
        }
        holds |= {
            container.pod.name: metric(container, "swarm_ingest_accepted_total") >= 1
            for container in with_role(running, "verifier")
        }
        if all(holds.values()):
            return
        wait_for(running, holds, "each trainer has taken a step and each verifier a foreign group", deadline)


@pytest.mark.slow
def test_a_container_may_write_to_its_volumes_alone_is_nobody_and_sees_nothing_of_this_machine(running: dict[str, Running]) -> None:
    looked_at = ["/", "/app", "/etc", "/opt/swarm", "/etc/swarm", "/policies", "/tmp", "/var/lib/swarm"]
    script = f"""import os
print(os.getuid(), *[path for path in {looked_at} if os.access(path, os.W_OK)])
print(os.path.exists({str(REPOSITORY / "tests")!r}), sorted(os.listdir("/app")))"""
    for container in running.values():
        role = container.pod.role
        if role == "nats":  # its image has no interpreter
            continue
        done = container.execute(["python", "-c", script], 60)
        assert done.returncode == 0, done.stderr
        may_write, sees = done.stdout.splitlines()
        assert may_write == "10001 " + ("/policies " if role == "trainer" else "") + "/tmp /var/lib/swarm", container.pod.name
        assert sees == "False " + ("[]" if role == "verifier" else "['models']"), container.pod.name
        assert re.search(r"^CapBnd:\s+0+$", Path(f"/proc/{container.pid}/status").read_text(), re.MULTILINE), container.pod.name


@pytest.mark.slow
def test_the_verifiers_image_has_no_torch_and_only_verifiers_lack_it(running: dict[str, Running]) -> None:
    for role in ("verifier", "trainer"):
        container = with_role(running, role)[0]
        done = container.execute(["python", "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"], 60)
        found = done.returncode == 0 and done.stdout.strip() not in ("", "None")
        assert found == (role == "trainer"), f"{role}: {done.stdout}{done.stderr}"


@pytest.mark.slow
def test_asked_to_end_every_container_ends_in_order_within_its_grace_period(running: dict[str, Running]) -> None:
    complaints = {name: container.complaints for name, container in running.items() if container.complaints}
    assert not complaints
    with ThreadPoolExecutor(len(running)) as all_at_once:  # as when the namespace is deleted
        ended: dict[str, Ended] = dict(zip(running, all_at_once.map(Running.stop, running.values()), strict=True))
    print({name: f"{end.seconds:.1f} s of {running[name].pod.grace_s:.0f}" for name, end in ended.items()})
    assert all(end == Ended(0, end.seconds, killed=False) for end in ended.values()), "\n".join(
        f"{name}: {end}\n{running[name].words()}" for name, end in ended.items() if end.code or end.killed
    )

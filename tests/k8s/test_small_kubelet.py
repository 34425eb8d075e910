"""The tests' own kubelet does as a kubelet does: what a cluster's tests show is worth no more than
that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lives import FIRST_PAUSE_S, LONGEST_PAUSE_S, BackOff, Life
from tests.cluster.pod_processes import ClaimedVolumes
from tests.k8s.images import by_image, read_stages
from tests.k8s.kubelet import Kubelet, Running
from tests.k8s.manifests import REPOSITORY
from tests.k8s.pod_network import PodNetwork
from tests.k8s.pods import Pod
from tests.k8s.test_run_overlay import why_not

DEADLINE_S = 180.0
USER = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001, "readOnlyRootFilesystem": True}
WAITS = "import signal, time; signal.signal(signal.SIGTERM, {}); print('begun', flush=True); time.sleep(600)"
SERVES = """
import http.server, time
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print('asked', self.path, time.monotonic(), flush=True)
        self.send_response(500 if self.path == '/ill' else 200)
        self.end_headers()
http.server.HTTPServer(('0.0.0.0', 9400), Page).serve_forever()
"""

Start = Callable[[Pod], Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a pod's container; all are ended afterwards."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    stages, network, started = read_stages(REPOSITORY / "Dockerfile"), PodNetwork(f"sk{os.getpid()}"), []
    kubelet, address = Kubelet(tmp_path, network, (), stages, by_image(stages)), network.add_pod("it")

    def begin(pod: Pod) -> Running:
        started.append(kubelet.start(pod, address, "127.0.0.1 localhost\n"))
        return started[-1]

    try:
        yield begin
    finally:
        for each in started:
            each.kill()
        network.close()


def container(script: str, **more: Any) -> dict[str, Any]:
    mounts = [{"name": "tmp", "mountPath": "/tmp"}]
    return {"name": "c", "image": "swarm", "command": ["python", "-c", script], "volumeMounts": mounts, **more}


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), grace_s: int = 60) -> Pod:
    spec = {
        "securityContext": USER,
        "terminationGracePeriodSeconds": grace_s,
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "initContainers": list(init),
        "containers": list(containers),
    }
    return Pod("it", "role", {}, spec, {})


def hook(command: str) -> dict[str, Any]:
    return {"preStop": {"exec": {"command": ["sh", "-c", command]}}}


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.slow
def test_the_hook_runs_before_sigterm_which_the_process_may_answer(start: Start) -> None:
    script = WAITS.format("lambda *_: exit(open('/tmp/hook').read() != 'ran')")
    running = start(pod(container(script, lifecycle=hook("printf ran > /tmp/hook"))))
    until(lambda: "begun" in running.words(), "it began")
    ended = running.stop()
    assert (ended.code, ended.killed, ended.hook_problem) == (0, False, None)


@pytest.mark.slow
def test_a_hook_that_fails_is_told_and_who_outlasts_the_grace_of_the_deletion_is_killed(start: Start) -> None:
    running = start(pod(container(WAITS.format("signal.SIG_IGN"), lifecycle=hook("exit 3"))))
    until(lambda: "begun" in running.words(), "it began")
    ended = running.stop(grace_s=1.0)
    assert ended.killed and ended.code != 0 and ended.hook_problem is not None and "ended with 3" in ended.hook_problem


@pytest.mark.slow
def test_a_container_that_has_only_just_been_started_can_be_stopped(start: Start) -> None:
    ended = start(pod(container("import time; time.sleep(600)"))).stop(grace_s=1.0)
    assert ended.code != 0


@pytest.mark.slow
def test_a_command_in_a_container_that_has_only_just_been_started_waits_for_it(start: Start) -> None:
    assert start(pod(container("import time; time.sleep(600)"))).execute(["python", "-c", "print(7)"], 120).stdout == "7\n"


@pytest.mark.slow
def test_readiness_waits_once_at_first_and_for_as_many_answers_as_it_says(start: Start) -> None:
    delay_s = 2
    probe = {"httpGet": {"path": "/", "port": 9400}, "initialDelaySeconds": delay_s, "periodSeconds": 0.1, "successThreshold": 3}
    running = start(pod(container(SERVES, readinessProbe=probe)))
    running.watch()
    until(lambda: running.ready, "it is ready")
    asked = [float(line.split()[2]) for line in running.words().splitlines() if line.startswith("asked")]
    assert len(asked) >= 3 and asked[2] - asked[0] < 2 * delay_s


def test_a_probe_that_it_does_not_know_is_refused_before_anything_starts(start: Start) -> None:
    for probe in ({"exec": {"command": ["true"]}}, {"httpGet": {"path": "/", "port": 1, "scheme": "HTTPS"}}):
        with pytest.raises(AssertionError, match="does not know"):
            start(pod(container(WAITS, livenessProbe=probe)))


@pytest.mark.slow
def test_an_init_container_that_fails_is_run_again_before_the_containers_start(start: Start) -> None:
    """It ends with 1 the first time, when the volume that they share is empty."""
    init = container("import os; there = os.path.exists('/tmp/x'); open('/tmp/x', 'w'); exit(not there)", name="init")
    life = Life(
        pod(container("import os, time; print(os.listdir('/tmp'), flush=True); time.sleep(600)"), init=(init,)),
        "m",
        frozenset(),
        start,
    )
    first = life.status("10.0.0.1")
    assert first["phase"] == "Pending" and {"type": "Initialized", "status": "False"}.items() <= first["conditions"][0].items()

    def runs() -> bool:
        life.look()
        return bool(life.status("10.0.0.1")["phase"] == "Running")

    until(runs, "the container runs")
    status = life.status("10.0.0.1")
    assert status["conditions"][0]["status"] == "True"
    assert status["initContainerStatuses"][0]["restartCount"] == 1
    assert status["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
    assert status["containerStatuses"][0]["restartCount"] == 0
    until(lambda: "['x']" in life.container.words(), "it sees what the init container wrote")


@pytest.mark.slow
def test_a_container_whose_liveness_probe_fails_is_ended_within_its_grace_and_started_again(start: Start) -> None:
    """Nothing waits for it meanwhile: a kubelet has other pods."""
    ill = {"httpGet": {"path": "/ill", "port": 9400}, "periodSeconds": 0.1, "failureThreshold": 2, "initialDelaySeconds": 1}
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVES
    life = Life(pod(container(script, livenessProbe=ill), grace_s=3), "m", frozenset(), start)
    first = life.container
    until(lambda: first.complaints, "the probe failed")
    began = time.monotonic()
    life.look()
    assert time.monotonic() - began < 2 and first.process.poll() is None

    def again() -> bool:
        life.look()
        return life.container is not first

    until(again, "it is started again")
    status = life.status("10.0.0.1")["containerStatuses"][0]
    assert status["restartCount"] == 1 and status["lastState"]["terminated"]["reason"] == "Error"


@pytest.mark.slow
def test_containers_of_a_pod_see_each_others_processes_and_memory_and_one_that_ends_is_started_again_alone(start: Start) -> None:
    """One asks the other, by the process id in their common volume, for a signal's answer, and then
    ends."""
    memory = [{"name": "run", "mountPath": "/run/both"}, {"name": "tmp", "mountPath": "/tmp"}]
    asked = """
import os, signal, time
signal.signal(signal.SIGHUP, lambda *_: print('asked', flush=True))
open('/run/both/new', 'w').write(str(os.getpid()))
os.replace('/run/both/new', '/run/both/pid')
while True: time.sleep(0.1)
"""
    asks = """
import os, signal, time
while not os.path.exists('/run/both/pid'): time.sleep(0.1)
os.kill(int(open('/run/both/pid').read()), signal.SIGHUP)
exit(3)
"""
    both = pod(container(asked, volumeMounts=memory), container(asks, volumeMounts=memory, name="asks"), grace_s=3)
    both.spec["shareProcessNamespace"] = True
    both.spec["volumes"].append({"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
    life = Life(both, "m", frozenset(), start)

    def restarts() -> list[int]:
        life.look()
        return [each["restartCount"] for each in life.status("10.0.0.1")["containerStatuses"]]

    until(lambda: restarts()[1] >= 1 and life.container.words().count("asked") >= 2, "it was asked by two lives of the other")
    until(lambda: restarts() and life.named("asks").process.poll() is not None, "the other ended")
    status = life.status("10.0.0.1")
    assert restarts()[0] == 0 and life.container.process.poll() is None
    assert {"type": "Ready", "status": "False"}.items() <= status["conditions"][1].items()
    ended = life.end(3.0)
    assert ended.code == 128 + 15 and all(each.process.poll() is not None for each in life.running())


def test_the_first_restart_comes_at_once_and_the_pause_doubles_until_a_long_life_ends_it() -> None:
    back_off, pauses, at = BackOff(), [], 0.0
    for _ in range(8):
        pauses.append(back_off.restart_at(at) - at)
        back_off.restarted(at, back_off.restart_at(at))
        at = back_off.restarted_at or 0.0
    assert pauses == [0, 10, 20, 40, 80, 160, 300, 300]
    long_life = at + 2 * LONGEST_PAUSE_S + 1
    assert back_off.restart_at(long_life) == long_life
    back_off.restarted(long_life, long_life)
    assert back_off.restart_at(long_life + 1) == long_life + 1 + FIRST_PAUSE_S


def test_a_volume_goes_with_its_claim_and_a_claim_of_the_same_name_begins_with_an_empty_one(tmp_path: Path) -> None:
    def claims(**uids: str) -> list[dict[str, Any]]:
        return [{"metadata": {"name": name, "uid": uid}} for name, uid in uids.items()]

    volumes = ClaimedVolumes(tmp_path)
    volumes.keep(claims(var="1", model="2"))
    for name in ("var", "model"):
        volumes.path(name).mkdir()
        (volumes.path(name) / "file").write_text("kept")
    volumes.keep(claims(var="1", model="2"))
    assert (volumes.path("var") / "file").exists() and (volumes.path("model") / "file").exists()
    volumes.keep(claims(model="2"))
    assert not volumes.path("var").exists() and (volumes.path("model") / "file").exists()
    volumes.keep(claims(model="3"))
    assert not volumes.path("model").exists()

"""The trainer on several machines, as LeaderWorkerSet would start it: the real torchrun, with the
rendered commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.manifests import Object, find, kubernetes_pages, node_of, pod_of, render, selected, with_kind, workloads
from tests.nats_server import free_port

VARIANT = "cluster-trainer-machines"
PROBE = """import json, os, sys
named = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")}
open(f"{sys.argv[1]}/{named['RANK']}.json", "w").write(json.dumps(named))
"""


def group() -> Object:
    (found,) = with_kind(render(VARIANT), "LeaderWorkerSet")
    return found


def command_on(machine: int, size: int) -> list[str]:
    """With the variables that LeaderWorkerSet sets in every container, as kubelet fills them in."""
    told = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(machine), "LWS_LEADER_ADDRESS": "127.0.0.1"}
    template = group()["spec"]["leaderWorkerTemplate"]["workerTemplate" if machine else "leaderTemplate"]
    return [re.sub(r"\$\((\w+)\)", lambda match: told[match[1]], word) for word in template["spec"]["containers"][0]["command"]]


@pytest.mark.slow
def test_processes_of_all_machines_find_each_other_and_are_numbered_through(tmp_path: Path) -> None:
    size, port = group()["spec"]["leaderWorkerTemplate"]["size"], free_port()
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)
    agents = []
    try:
        for machine in range(size):
            command = command_on(machine, size)
            assert command[0] == "torchrun" and command[-2:] == ["-m", "services.trainer"]
            flags = [word.replace("29500", str(port)) for word in command[1:-2]]
            flags[flags.index("--nproc-per-node") + 1] = "1"
            run = [sys.executable, "-m", "torch.distributed.run", *flags, str(probe), str(tmp_path)]
            agents.append(subprocess.Popen(run, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        for agent in agents:
            _, said = agent.communicate(timeout=150)
            assert agent.returncode == 0, said
    finally:
        for agent in agents:
            agent.kill()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert [each["WORLD_SIZE"] for each in ranks] == [str(size)] * size and {each["LOCAL_RANK"] for each in ranks} == {"0"}


def test_the_group_replaces_the_stateful_set_with_all_that_was_changed_in_it() -> None:
    objects, before = render(VARIANT), find(render("cluster"), "StatefulSet", "gamma-trainer")
    assert not [each for each in with_kind(objects, "StatefulSet", "Service") if each["metadata"]["name"] == "gamma-trainer"]
    was, told = pod_of(before)["containers"][0], group()["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        now = told[part]["spec"]["containers"][0]
        for field in ("image", "resources", "volumeMounts", "envFrom"):
            assert now[field] == was[field], (part, field)
        for field in ("terminationGracePeriodSeconds", "priorityClassName", "nodeSelector", "tolerations", "securityContext"):
            assert told[part]["spec"][field] == pod_of(before)[field], (part, field)
    leader = told["leaderTemplate"]["spec"]["containers"][0]
    assert leader["env"] == was["env"]
    assert all(leader[probe] == was[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe"))
    (claim,) = before["spec"]["volumeClaimTemplates"]
    assert find(objects, "PersistentVolumeClaim", "gamma-trainer")["spec"] == claim["spec"]
    assert told["restartPolicy"] == "RecreateGroupOnPodRestart" and group()["spec"]["replicas"] == 1


def test_its_pods_reach_each_other_and_no_other_nodes() -> None:
    objects = render(VARIANT)
    policy = find(objects, "NetworkPolicy", "gamma-trainer-machines")
    for selector in (
        policy["spec"]["podSelector"],
        policy["spec"]["ingress"][0]["from"][0]["podSelector"],
        policy["spec"]["egress"][0]["to"][0]["podSelector"],
    ):
        taken = [each for each in workloads(objects) if selected(selector, each["spec"]["template"]["metadata"]["labels"])]
        assert {node_of(each) for each in taken} == {"gamma"} and len(taken) == 2
    (port,) = policy["spec"]["ingress"][0]["ports"]
    assert port["port"] <= 29500 <= port["endPort"]


def test_the_page_says_how_to_put_a_trainer_on_several_machines() -> None:
    page = kubernetes_pages()
    assert "`trainer-machines`" in page and "`generator-gpus`" in page

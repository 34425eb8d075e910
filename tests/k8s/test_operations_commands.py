"""What the pages on Kubernetes tell to type is done, where no cluster is needed for it: on a copy
of the overlays, and with the rendered objects.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from swarm_cli.app import app
from swarm_cli.invitation import read_token
from tests.k8s.manifests import REPOSITORY, build, find, kubernetes_pages, node_of, parsed, render, role_of, with_kind

PAGE = kubernetes_pages()


def typed(heading: str) -> list[str]:
    """The indented commands of a section."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^ {4,}(\S.+)$", section, re.MULTILINE)


def test_the_commands_that_add_a_node_bring_its_objects_and_change_nobody_elses(tmp_path: Path) -> None:
    own = str(tmp_path / "ours")
    assert CliRunner().invoke(app, ["k8s", "overlay", own, "--nodes", "alpha,beta,gamma"]).exit_code == 0
    before = parsed(build(Path(own)))
    (command,) = [each for each in typed("Adding a node") if each.startswith("swarm k8s overlay")]
    assert CliRunner().invoke(app, [own if word == "../ours" else word for word in command.split()[1:]]).exit_code == 0
    after = list(parsed(build(Path(own))))
    assert [each for each in after if node_of(each) != "delta"] == list(before)
    (settings,) = [
        each["data"]["node.toml"] for each in with_kind(after, "ConfigMap") if each["metadata"]["name"].startswith("delta-node")
    ]
    assert 'id = "delta"' in settings and "alpha" not in settings
    assert "alpha" not in json.dumps([each for each in after if node_of(each) == "delta"])


def test_the_namespace_that_is_made_first_is_that_of_the_overlays() -> None:
    files = set(re.findall(r"kubectl apply --filename (k8s/[^\s`]+)", PAGE))
    (file,) = files
    for overlay in ("cluster", "joined"):
        assert find(render(overlay), "Namespace", "swarm") == yaml.safe_load((REPOSITORY / file).read_text())


def test_the_trainer_that_sleeps_while_its_folder_is_put_back_keeps_all_but_its_command() -> None:
    (command,) = [each for each in typed("Backup and restore of a trainer") if " patch " in each]
    (change,) = json.loads(shlex.split(command)[-1])
    assert change["op"] == "replace" and change["path"] == "/spec/template/spec/containers/0/command"
    trainers = [each for each in with_kind(render("cluster"), "StatefulSet") if role_of(each) == "trainer"]
    assert len(trainers) == 3 and all(each["spec"]["template"]["spec"]["containers"][0]["command"] for each in trainers)
    process = subprocess.Popen([*change["value"]], start_new_session=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.wait(10) in (0, 143)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # in a pod nothing outlives its first process


def test_a_token_made_as_the_page_says_has_the_tasks_of_the_clusters_node(tmp_path: Path) -> None:
    (command,) = [each for each in typed("Join from outside the cluster") if each.startswith("swarm invite")]
    _, *words = shlex.split(command)
    keys = tmp_path / "keys"
    runner = CliRunner()
    runner.invoke(app, ["k8s", "secrets", "--nodes", "alpha", "--keys", str(keys)], catch_exceptions=False)
    (tmp_path / "roster.txt").write_text("")
    files = {"keys/ca.crt": str(keys / "ca.crt"), "roster.txt": str(tmp_path / "roster.txt")}
    runner.invoke(app, ["k8s", "overlay", str(tmp_path / "ours"), "--nodes", "alpha"], catch_exceptions=False)
    said = [files.get(word, word.replace("../ours", str(tmp_path / "ours"))) for word in words]
    done = runner.invoke(app, said, catch_exceptions=False)
    tasks = {task.dataset for task in read_token(done.stdout.strip()).accepts.tasks}
    assert {"base_conversion", "fraction_simplification", "gcd"} == tasks


def test_a_build_that_fails_is_told_in_a_sentence_and_changes_no_overlay(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n[ $1 = build ] || exit 0\necho Cannot connect to the Docker daemon >&2\nexit 1\n")
    docker.chmod(0o755)
    settings = {**os.environ, "DOCKER": str(docker), "REGISTRY": "registry.example.org/ml", "PUSH": "1"}
    command = [sys.executable, str(REPOSITORY / "scripts/images"), "nats"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"`{docker} build` ended with 1: what it said is above; nothing was written into k8s/"

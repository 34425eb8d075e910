"""The command `swarm k8s check` over a `kubectl` on PATH that renders with the real one and replays
a cluster's objects: what it prints, how it ends, and what it says without a cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_cli.app import app
from tests import forked
from tests.k8s.cluster_shapes import Listed, no_plugin
from tests.k8s.manifests import REPOSITORY, kustomize

FAKE = """#!{python}
import json, os, sys
from pathlib import Path
words, told = sys.argv[1:], json.loads(Path({told!r}).read_text())
if words[0] == "kustomize":
    os.execv({real!r}, [{real!r}, *{rest!r}, *words[1:]])
if words[:2] == ["config", "current-context"]:
    print("trial")
elif words[0] == "version":
    if "serverVersion" not in told:
        sys.exit("Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout")
    print(json.dumps({{"clientVersion": {{"minor": "34"}}, "serverVersion": told["serverVersion"]}}, indent=2))
elif words[0] == "get":
    kind = "dns" if words[1] == "pods" else words[1]
    if kind not in told:
        sys.exit(f'Error from server (Forbidden): {{kind}} is forbidden: User "dev" cannot list resource "{{kind}}"')
    items = [] if "daemonset-dns" in " ".join(words) else told[kind]
    print(json.dumps({{"apiVersion": "v1", "kind": "List", "items": items}}))
else:
    sys.exit(f"not expected: {{words}}")
"""


def run(folder: Path, listed: Listed | dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = kustomize()
    if command is None:
        pytest.skip("neither kubectl nor kustomize is here")
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "told.json").write_text(json.dumps(listed))
    fake = folder / "bin" / "kubectl"
    fake.write_text(FAKE.format(python=sys.executable, told=str(folder / "told.json"), real=command[0], rest=list(command[1:])))
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    return forked.run("swarm_cli", ("k8s", "check", *arguments), environment=environment, cwd=REPOSITORY, timeout=120)


@pytest.mark.slow
def test_the_command_renders_asks_the_cluster_and_ends_with_1_if_anything_stops(cluster: Listed, tmp_path: Path) -> None:
    """Before anything is set up: no images, no Secrets, no GPUs."""
    no_plugin(cluster)
    del cluster["secrets"]
    done = run(tmp_path, cluster | {"serverVersion": {"minor": "33+", "major": "1"}}, "k8s/overlays/cluster")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["stops", "stops", "note", "note"], lines
    assert "no image is named yet" in lines[0] and "offers nvidia.com/gpu" in lines[1]
    assert any("secrets could not be read" in line and "cannot list resource" in line for line in lines)
    assert "k8s/overlays/cluster on trial: 2 of 4 findings would stop it" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("nonsense", [5, [5], [{}]], ids=repr)
def test_what_is_no_list_of_objects_is_told_and_the_rest_is_checked(nonsense: object, cluster: Listed, tmp_path: Path) -> None:
    told = cluster | {"serverVersion": {"minor": "33", "major": "1"}, "storageclasses": nonsense}
    done = run(tmp_path, told, "k8s/overlays/cluster")
    assert "storageclasses could not be read" in done.stdout and "kubectl did not print a list of objects" in done.stdout
    assert "no image is named yet" in done.stdout and "Traceback" not in done.stderr, done.stderr


def test_without_a_cluster_what_is_missing_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = tmp_path / "rendered.yaml"
    overlay.write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: swarm}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = CliRunner().invoke(app, ["k8s", "check", str(overlay)]).stderr
    assert "kubectl is not on the PATH, so no cluster was checked: install it" in said
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho error: current-context is not set >&2\nexit 1\n")
    kubectl.chmod(0o755)
    said = CliRunner().invoke(app, ["k8s", "check", str(overlay)]).stderr
    assert "kubectl has no current context, so no cluster was checked: set KUBECONFIG" in said


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_and_an_overlay_that_is_none_are_sentences(tmp_path: Path) -> None:
    done = run(tmp_path, {}, "k8s/overlays/single-box")
    assert done.returncode == 1 and "the cluster trial does not answer: Unable to connect" in done.stderr
    (tmp_path / "some.yaml").write_text("a: 1\n")
    done = run(tmp_path, {}, str(tmp_path / "some.yaml"))
    assert done.returncode == 1 and "does not hold only Kubernetes objects" in done.stderr
    assert "Traceback" not in done.stderr

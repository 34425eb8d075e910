"""`swarm k8s check` names what would stop an overlay and nothing else tells in time: its rules over
the rendered overlays and over hand-written objects (`cluster_shapes.py`), and the command over a
`kubectl` on PATH that renders with the real one and replays a cluster's objects.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_cli.app import app
from swarm_cli.k8s.check import STEPS, Cluster, cluster_findings, image_findings
from swarm_cli.k8s.overlay import Overlay, quantity
from tests import forked
from tests.k8s.cluster_shapes import Listed, dns_pod, named, quota
from tests.k8s.manifests import REPOSITORY, kustomize, render


def overlay_of(variant: str) -> list[dict[str, Any]]:
    return copy.deepcopy([each for each in render(variant) if each])


def told(listed: Listed, variant: str = "cluster", objects: list[dict[str, Any]] | None = None, **unread: str) -> list[str]:
    names = {kind: {each["metadata"]["name"] for each in of_kind} for kind, of_kind in listed.items()}
    cluster = Cluster(names, listed | {"DNS pods": listed["dns"]}, unread)
    return [str(each) for each in cluster_findings(Overlay(objects or overlay_of(variant)), cluster)]


def network_files(listed: Listed) -> None:
    listed["storageclasses"][0]["provisioner"] = "nfs.csi.k8s.io"


def small_quota(listed: Listed) -> None:
    listed["resourcequotas"] = [quota("team", **{"requests.nvidia.com/gpu": "8", "pods": "100"})]


def dns_elsewhere(listed: Listed) -> None:
    listed["dns"] = [dns_pod("networking")]


def dns_on_machines(listed: Listed) -> None:
    listed["dns"].append(dns_pod(host_network=True, local_ip="169.254.25.10"))


def cloud_dns(listed: Listed) -> None:
    del listed["dns"][:]


@pytest.mark.parametrize(
    ("change", "stops", "words"),
    [
        (network_files, False, ["data-nats would be on disks (nfs.csi.k8s.io)"]),
        (small_quota, True, ["ResourceQuota team allows 8 requests.nvidia.com/gpu and the overlay asks for 12"]),
        (dns_elsewhere, True, ["DNS is in the namespace networking", "NetworkPolicy `names`"]),
        (dns_on_machines, True, ["DNS answers at 169.254.25.10"]),
        (cloud_dns, False, ["no pod answers DNS", "169.254.169.254"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_blocker_is_one_line_with_the_remedy(
    change: Callable[[Listed], None], stops: bool, words: list[str], cluster: Listed
) -> None:
    assert told(cluster) == [], "the cluster fits"
    change(cluster)
    (line,) = told(cluster)
    assert line.startswith("stops " if stops else "note ") and "\n" not in line
    assert all(word in line for word in words), line


def test_a_missing_runtime_class_or_priority_class_is_told_with_the_workloads_without_pods(cluster: Listed) -> None:
    (line,) = told(cluster, "cluster-gpu-operator")
    assert line.startswith("stops  RuntimeClass nvidia does not exist, and no pod of alpha-generator")
    objects = [each for each in overlay_of("cluster") if each["kind"] != "PriorityClass"]
    lines = told(cluster, objects=objects)
    assert lines and all(line.startswith("stops  PriorityClass swarm-") for line in lines)
    cluster["priorityclasses"] += [named("PriorityClass", line.split()[2]) for line in lines]
    assert told(cluster, objects=objects) == []


@pytest.mark.parametrize(("running", "steps"), [(None, len(STEPS)), ("0.0.9", len(STEPS)), ("0.1.0", 0), ("0.2.0", 0), ("main", 0)])
def test_changes_that_need_a_step_are_named_between_what_runs_and_what_is_applied(
    running: str | None, steps: int, cluster: Listed
) -> None:
    server = named("StatefulSet", "nats")
    server["metadata"]["labels"] = {"app.kubernetes.io/version": running} if running else {"app.kubernetes.io/name": "swarm"}
    cluster["statefulsets"] = [server]
    lines = told(cluster)
    assert len(lines) == steps and all(line.startswith("note ") for line in lines)


def test_the_manifests_have_the_release_s_version_and_the_page_has_the_steps() -> None:
    (server,) = [each for each in overlay_of("cluster") if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "nats"]
    release = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert server["metadata"]["labels"]["app.kubernetes.io/version"] == release
    page = (REPOSITORY / "docs" / "kubernetes-change.md").read_text()
    rows = page.partition("### Changes that need a step")[2].partition("\n#")[0].splitlines()
    assert [f"| {step.version} | {step.what} | {step.remedy} |" for step in STEPS] == [row for row in rows if row.startswith("| ")][
        1:
    ]


def test_of_kinds_that_could_not_be_read_nothing_is_said_but_that(cluster: Listed) -> None:
    del cluster["runtimeclasses"], cluster["storageclasses"]
    lines = told(cluster, "cluster-gpu-operator", runtimeclasses="forbidden", storageclasses="forbidden")
    assert len(lines) == 2 and all(line.startswith("note") and "could not be read" in line for line in lines), lines


def test_quantities_are_kubernetes_own() -> None:
    said = {"250m": 0.25, "1536Mi": 1.5 * 2**30, "8": 8.0, "2e3": 2000.0, "90G": 9e10, "47920m": 47.92}
    assert {text: quantity(text) for text in said} == said
    with pytest.raises(ValueError, match="not a quantity"):
        quantity("8 GiB")


@pytest.mark.parametrize("image", ["registry.invalid/set-by-make-images/swarm@sha256:" + "4" * 64, "swarm@sha256:" + "0" * 64])
def test_a_placeholder_for_an_image_stops_the_overlay(image: str) -> None:
    pod = {"containers": [{"name": "it", "image": image}]}
    each = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "it"}, "spec": {"template": {"spec": pod}}}
    (found,) = image_findings(Overlay([each]))
    assert found.stops and image in found.what and "make images" in found.remedy
    pod["containers"][0]["image"] = "registry.example.org:5000/swarm@sha256:" + "4" * 64
    assert list(image_findings(Overlay([each]))) == []


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
    if "name" in words:
        sys.exit(print(*(f"{{kind}}/" + each["metadata"]["name"] for each in told[kind]), sep="\\n"))
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
    """Before anything is set up: no images, and storage classes that this user may not list."""
    del cluster["storageclasses"]
    small_quota(cluster)
    done = run(tmp_path, cluster | {"serverVersion": {"minor": "33+", "major": "1"}}, "k8s/overlays/cluster")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["stops", "stops", "note"], lines
    assert "no image is named yet" in lines[0] and "ResourceQuota team allows" in lines[1]
    assert "storageclasses could not be read" in lines[2] and "cannot list resource" in lines[2]
    assert "k8s/overlays/cluster on trial: 2 of 3 findings would stop it" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("nonsense", [5, [5], [{}]], ids=repr)
def test_an_answer_that_is_no_list_of_objects_is_told_and_the_rest_is_checked(
    nonsense: object, cluster: Listed, tmp_path: Path
) -> None:
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


def test_rules_that_no_prometheus_of_the_cluster_selects_are_named_with_the_label_to_add() -> None:
    def findings(*selectors: dict[str, Any]) -> list[str]:
        servers = [{"metadata": {"name": "p"}, "spec": {"ruleSelector": each, "podMonitorSelector": {}}} for each in selectors]
        cluster = Cluster({}, {"prometheuses": servers, "DNS pods": [dns_pod()]})
        return [str(each) for each in cluster_findings(Overlay(overlay_of("cluster-watched")), cluster) if "selects" in str(each)]

    release = {"matchLabels": {"release": "kube-prometheus-stack"}}
    (found,) = findings(release)
    assert "PrometheusRule swarm" in found and "release: kube-prometheus-stack" in found
    assert findings(release, {}) == [] == findings()

"""`swarm k8s overlay`: an overlay outside the tree has what the cluster overlay has, with its own
nodes; a second run keeps what its owner changed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.k8s.check import configuration_findings, namespace_findings
from swarm_cli.k8s.overlay import Overlay
from swarm_cli.task_probe import TaskProbe
from tests.k8s.manifests import K8S, build, label, name_of, node_of, parsed, render, role_of, with_kind, workloads


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["k8s", "overlay", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["k8s", "overlay", *map(str, arguments)])
    assert done.exit_code == 1 and isinstance(done.exception, CommandError), done.output
    return str(done.exception)


def switch(file: Path, component: str) -> None:
    text = file.read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("  # - ") and line.endswith(f"/components/{component}")]
    file.write_text(text.replace(f"{line}\n", line.replace("# ", "", 1) + "\n"))


def test_an_overlay_of_ones_own_is_the_cluster_overlay_with_its_nodes_and_namespace(tmp_path: Path) -> None:
    own = tmp_path / "own"
    run(own, "--nodes", "alpha,my-node", "--namespace", "team")
    switch(own / "kustomization.yaml", "monitoring")
    rendered = parsed(build(own))
    overlay = Overlay(rendered)
    assert overlay.nodes() == ["alpha", "my-node"] and overlay.namespace == "team"
    assert list(namespace_findings(overlay)) == []
    with TaskProbe() as apart:
        assert configuration_findings(overlay, apart) == []

    def of_node(objects: tuple[dict[str, object], ...], node: str | None) -> Counter[tuple[object, str]]:
        kept = [each for each in objects if node_of(each) == node]
        return Counter((each["kind"], name_of(each).removeprefix(f"{node}-").rpartition("-")[0]) for each in kept)

    of_tree = render("cluster")
    assert of_node(rendered, "my-node") == of_node(rendered, "alpha") == of_node(of_tree, "alpha")
    servers = {(each["kind"], name_of(each)) for each in of_tree if node_of(each) is None and each["kind"] != "Namespace"}
    assert servers <= {(each["kind"], name_of(each)) for each in rendered}
    stream = "NODE_MY-NODE"
    assert stream in (own / "nodes/my-node/kustomization.yaml").read_text()


def test_a_second_run_adds_a_node_and_keeps_what_its_owner_changed(tmp_path: Path) -> None:
    own, tree = tmp_path / "own", tmp_path / "tree"
    run(own, "--nodes", "alpha")
    before = {file: file.read_text() for file in own.rglob("*") if file.is_file()}
    run(own)
    assert {file: file.read_text() for file in own.rglob("*") if file.is_file()} == before
    (own / "nodes/alpha/node.toml").write_text("# mine\n" + (own / "nodes/alpha/node.toml").read_text())
    with (own / "kustomization.yaml").open("a") as file:
        file.write(
            "patches:\n  - target: {kind: PersistentVolumeClaim}\n    patch: |-\n"
            "      - {op: add, path: /spec/storageClassName, value: shared}\n"
        )
    switch(own / "every-node/kustomization.yaml", "model-download")
    shutil.copytree(K8S, tree / "k8s")
    said = run(own, "--nodes", "beta", "--base", tree)
    assert "not among --nodes: alpha" in said.replace("\n", " ")
    assert (own / "nodes/alpha/node.toml").read_text().startswith("# mine")
    names = [line for file in own.rglob("kustomization.yaml") for line in file.read_text().splitlines() if "/components/" in line]
    assert names and all("tree/k8s/components/" in line for line in names)
    objects = parsed(build(own))
    assert {node_of(each) for each in workloads(objects)} == {None, "alpha", "beta"}
    claims = with_kind(objects, "PersistentVolumeClaim")
    assert claims and all(each["spec"]["storageClassName"] == "shared" for each in claims)
    assert {label(each, "swarm-rl.dev/node") for each in objects if role_of(each) == "model-download"} == {"alpha", "beta"}


def test_images_that_were_pushed_from_the_tree_are_copied_and_later_placeholders_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, images = tmp_path / "own", tmp_path / "images"
    shutil.copytree(K8S / "components/images", images)
    run(own, "--nodes", "alpha")
    file = images / "kustomization.yaml"
    file.write_text(file.read_text().replace("0" * 64, "a" * 64))
    monkeypatch.setattr("swarm_cli.k8s.own_overlay._IMAGES", images)
    run(own)
    monkeypatch.undo()
    run(own)
    pods = [pod for each in workloads(parsed(build(own))) for pod in each["spec"]["template"]["spec"]["containers"]]
    assert pods and all(pod["image"].endswith("a" * 64) for pod in pods)


def test_the_rest_may_come_from_a_tagged_address(tmp_path: Path) -> None:
    tree, own = tmp_path / "tree", tmp_path / "own"
    shutil.copytree(K8S, tree / "k8s")

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tree), *arguments], check=True, capture_output=True, timeout=60)

    git("init", "--quiet")
    git("add", ".")
    git("-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "--quiet", "--message", "x")
    git("tag", "v1")
    git("tag", "v2")
    run(own, "--nodes", "alpha", "--base", f"file://{tree}?ref=v1")
    run(own, "--base", f"file://{tree}?ref=v2")
    assert "ref=v1" not in "".join(file.read_text() for file in own.rglob("kustomization.yaml"))
    run(own)
    assert f"file://{tree}//k8s/base/nats?ref=v2" in (own / "kustomization.yaml").read_text()
    assert Overlay(parsed(build(own))).nodes() == ["alpha"]

    # The example nodes as they are, with a component beside them.
    whole = tmp_path / "whole"
    whole.mkdir()
    for namespace, lost in (("", True), ("namespace: swarm\n", False)):
        (whole / "kustomization.yaml").write_text(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n" + namespace + "resources:\n"
            f"  - file://{tree}//k8s/overlays/cluster?ref=v1\ncomponents:\n  - file://{tree}//k8s/components/monitoring?ref=v1\n"
        )
        assert bool(list(namespace_findings(Overlay(parsed(build(whole)))))) is lost


def test_what_cannot_be_an_overlay_is_refused_with_a_remedy(tmp_path: Path) -> None:
    assert "name its nodes" in refused(tmp_path / "none")
    assert "letters" in refused(tmp_path / "none", "--nodes", "Alpha")
    assert "names no version" in refused(tmp_path / "none", "--nodes", "alpha", "--base", "https://example.org/swarm")
    assert not (tmp_path / "none").exists()
    assert "outside it" in refused(K8S / "overlays/mine", "--nodes", "alpha")

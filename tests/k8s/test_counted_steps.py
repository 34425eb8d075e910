"""docs/kubernetes-start.md: from nothing to training in at most 3 steps on a laptop's cluster and 8
on GPUs. A step is a numbered item with one block of at most two commands.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command

from swarm_cli.app import app
from tests.k8s.manifests import K8S, REPOSITORY, kubernetes_pages, name_of, render, with_kind

PAGE = kubernetes_pages()
ITEM = re.compile(r"^(\d+)\. (.+?)(?=^\d+\. |^\S)", re.MULTILINE | re.DOTALL)


def steps(heading: str) -> list[list[str]]:
    """The commands of each step under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = ITEM.findall(section)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    for number, text in found:
        assert len(re.findall(r"\n\n(?= {8}\S)", text)) == 1, f"{heading}, step {number}: one block"
    return [[line.strip() for line in text.splitlines() if line.startswith(" " * 8)] for _, text in found]


@pytest.mark.parametrize(("heading", "most"), [("One machine", 3), ("A cluster", 8)])
def test_there_are_no_more_steps_than_promised_and_none_hides_another(heading: str, most: int) -> None:
    found = steps(heading)
    assert 1 <= len(found) <= most
    readme = (REPOSITORY / "README.md").read_text()
    words = {3: "three steps to a trainer on a laptop's cluster", 7: "seven on GPUs"}
    assert " ".join(words[len(found)].split()) in " ".join(readme.split()), "README counts them"
    for number, commands in enumerate(found, 1):
        assert 1 <= len(commands) <= 2, f"{heading}, step {number}: {commands}"
        for command in commands:
            assert not re.search(r"&&|;|\\$|\bfor\b|<<", command), command
    assert found[-1][0].startswith("kubectl") and any(command.startswith("kubectl apply -k ") for each in found for command in each)


def test_the_images_that_are_loaded_are_those_of_the_overlay() -> None:
    used = {
        container["image"]
        for each in render("single-box")
        if each["kind"] in ("Deployment", "StatefulSet")
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    (load,) = steps("One machine")[1]
    assert set(load.split()) - {"kind", "load", "docker-image"} == used
    readme = (REPOSITORY / "README.md").read_text().split("### Kubernetes")[1].split("\n### ")[0]
    pasted = re.findall(r"^    (.+)$", readme, re.MULTILINE)
    (line,) = [each for each in pasted if "localhost/swarm" in each]  # a paste loads them into one cluster, not into three
    assert set(line.split()) - {"kind", "load", "docker-image"} == used
    (applied,) = [each for each in pasted if each.startswith("kubectl apply -k")]
    assert "overlays/single-box" in applied and pasted.index(line) < pasted.index(applied)
    (elsewhere,) = re.findall(r"`k3d image import (localhost.+?)`", PAGE)
    assert set(elsewhere.split()) == used


def test_the_secrets_step_names_every_node_and_every_swarm_command_exists() -> None:
    folders = {folder.name for folder in (K8S / "overlays/cluster/nodes").iterdir()}
    program: Any = get_command(app)
    for commands in steps("A cluster"):
        for command in commands:
            if command.startswith("swarm "):
                _, group, name, *rest = command.split(" | ")[0].split()
                options = {option for each in program.commands[group].commands[name].params for option in each.opts}
                assert {word for word in rest if word.startswith("--")} <= options
            if command.startswith("swarm k8s secrets"):
                assert set(command.split()[4].split(",")) == folders


def test_what_is_waited_for_is_in_the_overlay() -> None:
    for heading, overlay in (("One machine", "single-box"), ("A cluster", "cluster")):
        waits = [command for each in steps(heading) for command in each if "rollout status" in command]
        names = {name_of(each) for each in with_kind(render(overlay), "StatefulSet")}
        assert [re.search(r"statefulset/(\S+)", command)[1] in names for command in waits] == [True]  # type: ignore[index]

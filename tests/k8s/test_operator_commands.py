"""The commands of the runbooks and of the pages on Kubernetes: each program exists in the image of
the container that is named, and those for the operator's pod are run with its environment and keys
against three servers from the rendered configuration."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_cli.app import app
from tests.k8s.images import by_image, image_name, read_stages
from tests.k8s.manifests import KUBERNETES_PAGES, REPOSITORY, Object, environment, find, pod_of, render
from tests.k8s.test_nats_config import START_TIMEOUT_S, Server, cluster, keys

__all__ = ["cluster", "keys"]

PAGES = [*KUBERNETES_PAGES, *sorted((REPOSITORY / "docs/runbooks").glob("*.md"))]
FENCED = re.compile(r"^```.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OURS = {"swarm", "python", "torchrun", "hf"}
"""Programs that the images' environment brings (pyproject.toml)."""
ELSEWHERE = (
    *("up", "down", "top", "dashboard", "plot", "rollouts", "eval", "model", "task", "keys", "config", "roster"),
    *("invite", "join"),
)
"""Not of a server: of a machine's own run, of files, of somebody else's swarm, or until Ctrl-C."""
REPORT = "swarm nats report"
"""Of `swarm nats`, what looks at a server; `test_operating_steps` backs up and restores."""
PLACEHOLDERS = {"NODE": "alpha", "NAME": "mallory", "SEQ": "1"}


def inline(page: Path) -> list[str]:
    """Pieces of code on a page: within backticks, also over a line's end, and the lines of fenced
    and of indented code. What is not closed within its paragraph is none, so that no piece of prose
    between two of code is taken for one.
    """
    text = page.read_text()
    lines = [line.strip() for block in FENCED.findall(text) for line in block.splitlines()]
    said = FENCED.sub("\n", text).splitlines()
    lines += [line.strip() for line in said if line.startswith("    ")]
    prose = "\n".join("" if line.startswith("    ") else line for line in said)
    pieces = [piece for paragraph in prose.split("\n\n") for piece in re.findall(r"`([^`]+)`", paragraph)]
    return [*(" ".join(piece.split()) for piece in pieces), *lines]


def executed() -> list[tuple[str, str, str, str]]:
    """Each `kubectl exec`, once for each time that a page has it: page, pod, container and the
    command, with where it reads from and writes to.
    """
    found = []
    for page in PAGES:
        for line in inline(page):
            for pod, container, command in re.findall(r"exec (?:-it? )?(\S+) (?:-c (\S+) )?-- ([^;#]+)", line):
                found.append((page.name, pod, container, command.strip()))
    return found


def essential() -> set[str]:
    """Programs of the packages that every Debian has, the base image too."""
    shown = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Essential}\n"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in shown.stdout.splitlines() if line.endswith(" yes")]
    files = subprocess.run(["dpkg-query", "-L", *names], capture_output=True, text=True, check=True)
    return {Path(line).name for line in files.stdout.splitlines() if re.match(r"(/usr)?/s?bin/", line)}


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="wants Debian's package list to know what the base image has")
def test_every_program_that_a_page_runs_in_a_pod_is_in_that_containers_image() -> None:
    images = by_image(read_stages(REPOSITORY / "Dockerfile"))
    objects, has = render("cluster"), essential()
    assert {"sh", "tar", "df", "sleep"} <= has and not {"wget", "curl"} & has
    seen = executed()
    assert len(seen) >= 6
    for page, pod, container, command in seen:
        program = command.split()[0]
        name = re.sub(r"^(?:deploy|sts)/|-\$?\w$|\$\w+", "", pod).replace("NODE", "alpha").removeprefix("pod/")
        kind = "Deployment" if "deploy/" in pod else "StatefulSet"
        containers = pod_of(find(objects, kind, name))["containers"]
        (chosen,) = [each for each in containers if each["name"] == container] if container else containers[:1]
        image = images[image_name(chosen["image"].replace("swarm-cuda", "swarm"))]
        inside = {Path(target).name for _, target in image.copies} if image.scratch else has | OURS
        assert program in inside, f"{page}: {program} is not in {image.name}, the image of {pod}"


def as_operator(objects: tuple[Object, ...], folder: Path, keys: Path, servers: list[Server]) -> dict[str, str]:
    """The environment of alpha's operator container, with this machine's files and ports."""
    container = pod_of(find(objects, "Deployment", "alpha-operator"))["containers"][0]
    told = {name: str(value) for name, value in environment(objects, container).items()}
    volume = next(each for each in pod_of(find(objects, "Deployment", "alpha-operator"))["volumes"] if each["name"] == "config")
    (folder / "node.toml").write_text(find(objects, "ConfigMap", volume["configMap"]["name"])["data"]["node.toml"])
    urls = ",".join(f"tls://127.0.0.1:{server.port}" for server in servers)
    return {
        name: value.replace("tls://nats:4222", urls)
        .replace("/etc/swarm-ca", str(keys))
        .replace("/etc/swarm-keys/node.nk", str(keys / "alpha/operator.nk"))
        .replace("/etc/swarm-operator", str(keys / "operator"))
        .replace("/etc/swarm/", f"{folder}/")
        .replace("/var/lib/swarm", str(folder))
        for name, value in told.items()
    }


def run(words: list[str], told: dict[str, str]) -> tuple[int, str]:
    """A `swarm` command in this process; its exit code and all it said."""
    unset: dict[str, str | None] = {name: None for name in os.environ if name.startswith("SWARM_")}
    done = CliRunner().invoke(app, words, env={**unset, **told})
    assert not isinstance(done.exception, ValueError | TypeError | LookupError), (words, done.exception)
    return done.exit_code, done.output + str(done.exception or "")


def said_commands() -> set[str]:
    """Every `swarm` command that the pages tell to type or name, each once, without what it is
    piped to or from. One with `...` in it is not whole.
    """
    said = {line for page in PAGES for line in inline(page) if re.match(r"swarm [a-z]", line)}
    return {re.split(r" (?:&&|[|<>]+|#) ", line)[0].strip() for line in said if "..." not in line.replace('"..."', "")}


def for_the_operator() -> list[str]:
    """Return what the pages tell to type that asks or changes a server, each once."""
    commands = {each for each in said_commands() if not each.startswith(("swarm plane", "swarm nats ")) or each.startswith(REPORT)}
    named = [each for each in commands if each.split()[1] not in ELSEWHERE]
    return sorted([*named, "swarm nats init --plane node", "swarm nats init --plane swarm"])


def refuse_what_a_page_must_not_lead_to(command: str, code: int, said: str) -> None:
    """A command that a page shows may find nothing, or say what it lacks; it may not be denied,
    hang or break.
    """
    print(code, command, "->", said.strip()[-160:])
    assert "Traceback" not in said and not re.search(r"denied|permission|cannot connect|timed? ?out", said, re.IGNORECASE), said
    assert code == 0 or said.strip(), command
    if command == "swarm status":  # shows the node's streams, though this pod has no key for the swarm's
        # A narrow terminal cuts the names of streams.
        assert "NODE_ALPHA_R" in said and "no service has written a status" in said, said


@pytest.mark.slow
def test_the_operators_pod_makes_the_streams_and_runs_what_the_pages_tell_it_to(
    cluster: list[Server], keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # `swarm k8s secrets` writes keys where it is typed
    (tmp_path / "k8s").symlink_to(REPOSITORY / "k8s")
    objects = render("cluster")
    told = as_operator(objects, tmp_path, keys, cluster)
    first = {"node-plane": "node plane of alpha: all streams exist", "swarm-plane": "swarm plane: all streams exist"}
    for container in pod_of(find(objects, "Deployment", "alpha-operator"))["initContainers"]:
        own = {name: str(value) for name, value in environment(objects, container).items() if name.startswith("SWARM_NATS__")}
        files = {"/etc/swarm-keys/node.nk": keys / "alpha/operator.nk", "/etc/swarm-operator/swarm.nk": keys / "operator/swarm.nk"}
        words = [str(files.get(word, word)) for word in container["command"][3:]]
        mine = {name: value for name, value in told.items() if name != "SWARM_NATS__REPLICAS"}
        mine |= {name: value for name, value in own.items() if "REPLICAS" in name}
        deadline = time.monotonic() + START_TIMEOUT_S
        while first[container["name"]] not in (said := run(words, mine))[1]:
            assert time.monotonic() < deadline, said
    commands = for_the_operator()
    assert len(commands) >= 10 and {"swarm status", "swarm ban", REPORT, f"{REPORT} --json"} <= set(commands)
    for command in commands:
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)[1:]]
        refuse_what_a_page_must_not_lead_to(command, *run(words, told))

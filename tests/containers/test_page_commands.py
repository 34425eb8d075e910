"""What the pages on Kubernetes and the runbooks tell to type in a pod, typed in the image of the
container that they name: the operators' pods and the NATS server of the secured overlay, from its
manifests, with the Secrets that `swarm k8s secrets` makes. The trainer's pod is in
`test_single_box`, where one trains.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
import yaml

from tests.containers.podman import Podman
from tests.containers.secured_pods import SecuredPods, workload_of
from tests.k8s.manifests import render
from tests.k8s.test_operator_commands import (
    PLACEHOLDERS,
    REPORT,
    executed,
    for_the_operator,
    refuse_what_a_page_must_not_lead_to,
)
from tests.secured_server import swarm

OPERATORS = ("alpha-operator", "swarm-operator")
SECURED = "cluster-one-server"

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def pods(podman: Podman, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredPods]:
    """The server and the two operators' pods."""
    keys, folder = tmp_path_factory.mktemp("keys"), tmp_path_factory.mktemp("pods")
    swarm("k8s", "secrets", "--nodes", "alpha,beta,gamma", "--keys", str(keys), "--out", str(keys / "secrets.yaml"))
    objects = (*render(SECURED), *yaml.safe_load_all((keys / "secrets.yaml").read_text()))
    started = SecuredPods(podman, objects, {"swarm": images["cpu"], "swarm-nats": images["nats"]}, folder)
    try:
        started.prepare()
        started.start("StatefulSet", "nats", "nats")
        for operator in OPERATORS:
            started.start("Deployment", operator)
        yield started
    finally:
        started.end()


def test_every_command_that_a_page_sends_to_a_pod_of_these_runs_there_and_succeeds(pods: SecuredPods) -> None:
    """In the order of the pages, with the files that one step leaves for the next. Before the test
    below, whose bans a restore would not overwrite.
    """
    files: dict[str, bytes] = {}
    digest, seen = "", set()
    for page, pod, container, command in executed():
        name = workload_of(pod)
        if name.endswith("-trainer"):
            continue  # the pods of the single box have a run (test_single_box)
        assert name in (*OPERATORS, "nats") and container in ("", "nats"), f"{page}: {pod}"
        typed, _, source = command.partition(" < ")
        typed, _, target = typed.partition(" > ")
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(typed)]
        code, out, said = pods.execute(name, words, files[source] if source else None)
        print(code, page, name, typed, "->", "" if target else said.strip()[-160:])
        nobody = typed == "swarm status" and re.search("no (service|node) has written", said)  # none runs here
        assert code == 0 or nobody, f"{page}: {typed}\n{said}"
        files |= {target: out} if target else {}
        if found := re.findall(r"\b[0-9a-f]{64}\b", said) if "nats backup --out" in typed else []:
            digest = found[-1]
        assert not typed.startswith("sha256sum") or digest in said, f"{page}: {typed}\n{said}"
        seen.add(name)
    assert seen == {*OPERATORS, "nats"} and digest


def test_every_command_for_the_operator_runs_in_the_operators_image(pods: SecuredPods) -> None:
    commands = [each for each in for_the_operator() if not each.startswith("swarm k8s")]
    assert len(commands) >= 10 and {"swarm status", "swarm ban", REPORT, f"{REPORT} --json"} <= set(commands)
    for command in commands:
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]
        code, _, said = pods.execute("alpha-operator", words)
        refuse_what_a_page_must_not_lead_to(command, code, said)
        assert "Read-only file system" not in said, said

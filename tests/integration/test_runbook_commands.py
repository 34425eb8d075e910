"""Every command that a runbook tells to type on one machine is typed there, in a shell: on the
machine of a `swarm up`, or on that of a secured server. Those for a cluster (`kubectl`) are in
`tests/k8s` and `tests/containers`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.machine_of_runbooks import NODE, RunningMachine, SecuredMachine, until
from tests.k8s.test_operator_commands import inline

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
CLUSTER = "kubectl"
PROGRAMS = {
    *("swarm", "python", "make", "nats", "nats-server", "torchrun", "hf", CLUSTER),
    *("curl", "wget", "nc", "openssl", "ping", "ip", "ss", "ssh", "dig", "getent"),
    *("df", "du", "ls", "cat", "head", "tail", "less", "grep", "jq", "cp", "mv", "rm", "mkdir", "tar", "sed", "awk", "find"),
    *("kill", "pkill", "ps", "top", "free", "dmesg", "journalctl", "systemctl", "timedatectl", "chronyc", "nvidia-smi", "sudo"),
}
"""What a piece of code on a page begins with if it is a command."""
TYPED_ALONE = {"timedatectl"}
"""Programs that are a command without a second word; others are only named so."""

COMPLETED = {
    "swarm ...": "swarm --help",
    "swarm nats config": "swarm nats config --plane both --nodes alpha --out new.conf",
    "swarm nats watch": "swarm nats watch --url tls://HOST:4222 --ca ca.crt --key keys/operator/watch.nk",
    "swarm plot": "swarm plot RUN",
    "swarm task audit": "swarm task audit gcd",
    "swarm task score": "swarm task score gcd --answer 3",
    "swarm task show": "swarm task show gcd",
    "swarm unban NAME": "swarm ban NAME && swarm unban NAME",
    "swarm up": "swarm up --print-procfile",
    "swarm up --nodes 1": "swarm up --nodes 1 --print-procfile",
    "swarm up --nodes 2": "swarm up --nodes 2 --print-procfile",
    "swarm up --run NEW": "swarm up --run NEW --print-procfile",
    "make run": f"make --dry-run --directory {ROOT} run",
    "make run RUN=NEW": f"make --dry-run --directory {ROOT} run RUN=NEW",
}
"""What is typed for a command that a page only names, or that would start another swarm here."""
SECURED = ("swarm nats watch", "swarm nats keys", "swarm nats config", "nats-server")
"""These begin commands for a server with users and TLS."""
UNTIL_CTRL_C = {"swarm nats watch": "watching"}
"""They go on until Ctrl-C, which comes when they have said this."""
OF_THE_SYSTEM = ("dmesg", "timedatectl", "chronyc")
"""Programs that a machine has or lacks, and that may want rights or a daemon: typed where they are,
whatever they answer.
"""
UNTIL_TIMEOUT = "curl -m 2 telnet://HOST:4222"
SAID = {
    UNTIL_TIMEOUT: "INFO {",
    "curl localhost:8222/healthz": '"ok"',
    "curl localhost:8222/jsz": '"max_storage"',
    "curl localhost:PORT/readyz": "ok",
    "curl http://HOST:PORT/readyz": "ok",
    "swarm config check --config node.toml": "OK: ",
    "swarm dlq show SEQ --node NODE": "of the test",
    "curl localhost:8222/varz": '"server_name"',
    "swarm nats init --plane both": "all streams exist",
    "swarm nats init --plane node": "all streams exist",
    "swarm nats init --plane swarm": "all streams exist",
    "swarm nats report": "NODE_ALPHA_ROLLOUTS",
    "swarm plot RUN": ".png",
    "swarm restart NODE-ROLE": f"{NODE}-",
    "swarm restart NODE-ROLE --now": f"{NODE}-",
    "swarm restart NODE-generator": f"{NODE}-generator: process ",
    "swarm restart NODE-trainer": f"{NODE}-trainer: process ",
    "swarm restart nats": "nats: process ",
    "swarm status": NODE,
    "swarm top": NODE,
}
"""A word of the answer, where the exit code alone says little."""
SILENT = ("nats-server", "dmesg", "swarm ban NAME", "swarm unban NAME")


def commands() -> dict[str, list[str]]:
    """Every command of the runbooks with the pages that have it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for piece in inline(page):
            for command in piece.split(" && "):
                words = command.split()
                if words and words[0] in PROGRAMS and (len(words) > 1 or words[0] in TYPED_ALONE):
                    found.setdefault(re.split(r"  +# ", command)[0].strip(), []).append(page.stem)
    return found


def order(command: str) -> tuple[bool, str]:
    """Processes are killed and started again last."""
    return command.startswith(("kill ", "swarm restart ")), command


FOR_A_MACHINE = sorted((each for each in commands() if each.split()[0] != CLUSTER), key=order)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMachine]:
    machine = RunningMachine(tmp_path_factory.mktemp("running"))
    try:
        machine.until_it_trains()
        machine.rest()
        yield machine
    finally:
        said = machine.end()
    assert "Traceback" not in said and "continues training" in said, said[-4000:]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredMachine]:
    machine = SecuredMachine(tmp_path_factory.mktemp("secured"))
    yield machine
    machine.end()


def test_every_command_that_is_completed_here_is_on_a_page() -> None:
    assert len(FOR_A_MACHINE) >= 60
    on_pages = commands().keys()
    assert not COMPLETED.keys() - on_pages and not UNTIL_CTRL_C.keys() - on_pages


@pytest.mark.parametrize("command", FOR_A_MACHINE)
def test_a_runbooks_command_does_what_it_is_said_to_on_one_machine(command: str, request: pytest.FixtureRequest) -> None:
    if command.startswith(OF_THE_SYSTEM) and shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not on this machine")
    machine = request.getfixturevalue("secured" if command.startswith(SECURED) else "running")
    if command.startswith("kill "):
        send(command, machine)
        return
    typed = COMPLETED.get(command, command)
    if "SEQ" in typed:
        typed = typed.replace("SEQ", str(machine.bury_a_group()))
    typed = typed.replace("OUT", f"out-{FOR_A_MACHINE.index(command)}")
    if command in UNTIL_CTRL_C:
        code, said = machine.watch(typed, UNTIL_CTRL_C[command])
    else:
        code, said = machine.type(typed)
    print(code, machine.filled(typed), "->", said.strip()[-200:])
    assert "Traceback" not in said, said
    accepted = range(256) if command.startswith(OF_THE_SYSTEM) else (28,) if command == UNTIL_TIMEOUT else (0,)
    assert code in accepted, f"{commands()[command]}: {machine.filled(typed)}\n{said}"
    assert SAID.get(command, "") in said and (said.strip() or command.startswith(SILENT)), f"{command}\n{said}"


def send(command: str, machine: RunningMachine) -> None:
    """To processes of which a page says so, by the pid in their logs; what was killed is started
    again.
    """
    for log in (f"{NODE}/trainer.log", "nats.log"):
        before = machine.pid(log)
        if command == "kill -CONT":
            machine.type(f"kill -STOP {before}")
        code, said = machine.type(f"{command} {before}")
        assert code == 0, said
        if command == "kill -9":
            until(lambda log=log, before=before: machine.pid(log) != before, lambda log=log: machine.text(log)[-2000:])  # type: ignore[misc]

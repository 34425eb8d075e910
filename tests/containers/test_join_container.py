"""`swarm join` in the image, by the line that docs/joining.md shows: a hub, a node that joined
before, and a newcomer, each a container on one network with nothing mounted but its volume.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.conftest import ROOT
from tests.containers.podman import NAME, Podman, figure
from tests.e2e.networks import promised_s

PAGE = (ROOT / "docs" / "joining.md").read_text()
(HUB,) = re.findall(r"```\n(# hub.conf\n.*?)```", PAGE, flags=re.DOTALL)
(LINE,) = re.findall(r"^    docker (run .+ join TOKEN)$", PAGE, flags=re.MULTILINE)
"""What the page tells a newcomer to type."""
RESTRICTED = ("--cap-drop=all", "--security-opt=no-new-privileges", "--health-interval=disable")
"""As a pod's container is; and podman would ask systemd for a timer for the health check."""
NETWORK = f"{NAME}-join"
SHARES_S = 300.0
VERIFIER = 9401
"""Its port in a container that runs all four services."""

pytestmark = pytest.mark.timeout(1800)


class Joined:
    """A node in a container of its own, as the page's line starts it."""

    def __init__(self, podman: Podman, image: str, name: str) -> None:
        self.podman, self.image, self.name = podman, image, f"{NAME}-{name}"
        self._node = name

    def run(self, token: str) -> float:
        """Start it; returns when, on the clock of `time.monotonic`."""
        began = time.monotonic()
        self.podman(*self._words(token, "--detach", "--name", self.name, "--network", NETWORK, *RESTRICTED))
        return began

    def _words(self, token: str, *flags: str) -> list[str]:
        """The page's line, with this image, this volume and this token, detached in place of at a
        terminal.
        """
        words = shlex.split(LINE)
        assert words[0] == "run" and "-it" in words, LINE
        (volume,) = [word for word in words if word.endswith(":/var/lib/swarm")]
        changed = {volume: self.volume, "TOKEN": token}
        words = [changed.get(word, word) for word in words if word != "-it"]
        (image,) = [word for word in words if word.startswith("localhost/swarm:")]
        at = words.index(image)
        return ["run", *flags, *words[1:at], self.image, *words[at + 1 :], "--name", self._node]

    @property
    def volume(self) -> str:
        return f"{self.name}:/var/lib/swarm"

    def verifier(self, name: str, label: str = "") -> float:
        """A metric of the verifier; 0 where it does not answer yet."""
        state = self.podman.inspect(self.name)["State"]
        assert state["Status"] == "running", self.podman.logs(self.name)
        return figure(f"http://{self.podman.address(self.name)}:{VERIFIER}/metrics", name, label)

    @property
    def shares(self) -> bool:
        return self.verifier("swarm_rollout_publish_total", 'result="ok"') > 0

    @property
    def accepts(self) -> bool:
        return self.verifier("swarm_ingest_accepted_total") > 0

    def swarm(self, *command: str) -> str:
        """Return what a command says in the running container."""
        return self.podman("exec", self.name, "swarm", *command)

    def kill(self, command: str) -> None:
        """kill -9 to the one process whose command line begins so."""
        look = 'for each in /proc/[0-9]*; do tr "\\0" " " < $each/cmdline | grep -q "^$0" && echo ${each#/proc/}; done; true'
        (number,) = self.podman("exec", self.name, "sh", "-c", look, command).split()
        self.podman("exec", self.name, "sh", "-c", f"kill -9 {number}")
        assert self.verifier("swarm_ingest_accepted_total") == 0

    @property
    def zombies(self) -> list[str]:
        """Processes that ended and that nobody waited for."""
        told = self.podman.attempt("exec", self.name, "sh", "-c", "cat /proc/[0-9]*/stat").stdout
        return [line for line in told.splitlines() if line.rpartition(")")[2].split()[0] == "Z"]

    def kept(self) -> dict[str, str]:
        """Mode, owner and digest of each file of the swarm in the volume, by name."""
        look = "cd /var/lib/swarm/joined/swarm && for each in *; do stat -c '%n %a %u' $each; sha256sum < $each; done"
        told = self.podman.run(self.image, "sh", "-c", look, flags=["--volume", self.volume])
        return dict(zip((line.split()[0] for line in told.splitlines()[::2]), told.splitlines()[1::2], strict=True)) | {
            f"{line.split()[0]}'s mode": line.partition(" ")[2] for line in told.splitlines()[::2]
        }

    def end(self) -> int:
        """`docker stop`, with a minute for a checkpoint; the exit code. The container is removed,
        its volume is not.
        """
        self.podman("stop", "--time", "60", self.name)
        code = int(self.podman.inspect(self.name)["State"]["ExitCode"])
        self.podman("rm", self.name)
        return code


@pytest.fixture
def hub(podman: Podman, images: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """Address of a hub with the page's file, in the server's image; it makes the network too."""
    file = tmp_path / "hub.conf"
    file.write_text(HUB.replace("hub-streams", "/data"))
    file.chmod(0o644)
    podman("network", "create", NETWORK)
    name = f"{NAME}-hub"
    mounted = ("--read-only", "--volume", f"{file}:/etc/hub.conf:ro", "--volume", f"{name}:/data")
    try:
        podman("run", "--detach", "--name", name, "--network", NETWORK, *mounted, images["nats"], "-c", "/etc/hub.conf")
        yield f"nats://{name}:4222"
    finally:
        for made in ("hub", "alpha", "nova"):
            podman.attempt("rm", "--force", "--time", "0", f"{NAME}-{made}")
            podman.attempt("volume", "rm", "--force", f"{NAME}-{made}")
        podman.attempt("network", "rm", "--force", NETWORK)


def until(what: str, holds: Callable[[], bool], seconds: float, node: Joined) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{node.podman.logs(node.name)}"
        time.sleep(0.25)


def test_a_container_joins_by_one_line_and_accepts_a_foreign_group(podman: Podman, images: dict[str, str], hub: str) -> None:
    token = podman("run", "--rm", "--network", NETWORK, *RESTRICTED, images["cpu"], "invite", "--url", hub).split()[0]
    alpha, nova = (Joined(podman, images["cpu"], name) for name in ("alpha", "nova"))
    alpha.run(token)
    until("alpha shares", lambda: alpha.shares, SHARES_S, alpha)

    began = nova.run(token)
    until("nova accepts", lambda: nova.accepts, promised_s(), nova)
    print(f"first foreign group accepted {time.monotonic() - began:.1f} s after `podman run`; load {os.getloadavg()[0]:.1f}")

    told = podman.logs(nova.name, lines=200)
    assert [line.split()[1] for line in told.splitlines() if line.startswith("ok ")][:3] == ["connection", "clock", "name"], told
    shared = {node["node"]: node["shared"] for node in json.loads(nova.swarm("status", "--token", token, "--json"))["nodes"]}
    assert shared["alpha"] > 0, shared
    assert "nova" in nova.swarm("status", "--config", "var/joined/swarm/node.toml")
    until("nova is healthy", lambda: podman.attempt("healthcheck", "run", nova.name).returncode == 0, SHARES_S, nova)

    # What a killed service leaves behind becomes the first process's, which has to wait for it.
    nova.kill("python -m services.verifier")
    until("nova's verifier is back", lambda: nova.accepts and not nova.zombies, promised_s(), nova)

    assert nova.end() == 143
    kept = nova.kept()
    assert {name for name in kept if "'" not in name} == {"hub.json", "node.nk", "node.toml"}
    assert kept["node.nk's mode"] == "600 10001"

    # The same line again is the same node: its key, its name, its steps.
    nova.run(token)
    until("nova is back", lambda: nova.accepts, promised_s(), nova)
    assert nova.kept()["node.nk"] == kept["node.nk"]
    assert nova.end() == alpha.end() == 143

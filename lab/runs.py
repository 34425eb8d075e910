"""Finds an experiment's runs, their records, and the runs that are still missing.

    DIR/manifest.json                       spec, software, machine (no paths, no names)
    DIR/<arm>/settings.json                 the arm's settings, with defaults filled in
    DIR/<arm>/seed-<seed>/records.jsonl.gz  raw records
    DIR/<arm>/seed-<seed>/done.json         when complete: rounds, seconds, commit, digests

An interrupted run leaves a folder without done.json and is repeated from its start. That takes
minutes and gives the same result, because a run depends only on its spec and seed.
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

from lab.arms import plan_run
from lab.records import RECORDS_FILE
from lab.spec import Spec, SpecError, seeds_problem
from shared.atomic_files import replace_text
from shared.text import error_text

DONE_FILE = "done.json"
SETTINGS_FILE = "settings.json"
MANIFEST_FILE = "manifest.json"
DRIVER = "simulate"
"""Records of other drivers, as `q13-services`, can be read but not added to."""
_PACKAGES = ("torch", "transformers", "reasoning-gym", "numpy")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one arm and seed."""

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
        """Lock the run for this process; False while another process is making it. The lock is
        released when the process ends, however it ends.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            yield _locked(folder)
        finally:
            os.close(folder)

    def made_from(self) -> str | None:
        """The digest of the arm when a complete run was made; None if it was not recorded."""
        made: str | None = self._said().get("arm")
        return made

    def settings_digest(self) -> str | None:
        """The digest of a complete run's settings with all defaults filled in; None for runs made
        before digests were recorded.
        """
        digest: str | None = self._said().get("settings")
        return digest

    def commit(self) -> str:
        """The commit of the code that made a complete run, with `-dirty` if files differed from the
        commit.
        """
        commit: str = self._said().get("commit", "not recorded")
        return commit

    def finish(self, rounds: int, seconds: float, arm_digest: str, settings: Mapping[str, Any] | None = None) -> None:
        """Mark the run as complete. `settings` are the arm's resolved settings."""
        content = {
            "rounds": rounds,
            "seconds": round(seconds, 1),
            "arm": arm_digest,
            **({} if settings is None else {"settings": settings_digest(settings)}),
            "commit": code_commit(),
            "sha256": hashlib.sha256(self.records.read_bytes()).hexdigest(),
        }
        if settings is not None:
            replace_text(self.path.parent / SETTINGS_FILE, json.dumps(settings, indent=1) + "\n")
        replace_text(self.path / DONE_FILE, json.dumps(content) + "\n")

    def _said(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads((self.path / DONE_FILE).read_text(encoding="utf-8"))
        return said


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def run_folder(out: Path, arm: str, seed: int) -> RunFolder:
    """The folder of an arm and seed."""
    return RunFolder(arm, seed, out / arm / f"seed-{seed}")


def runs_to_make(spec: Spec, out: Path, arms: Sequence[str] | None = None, seeds: Sequence[int] | None = None) -> list[RunFolder]:
    """The runs that are not complete, ordered by seed, so that early results compare all arms.
    None: all of the spec's arms, all of its seeds.

    Raises: SpecError: an arm is not in the spec, or has complete runs that were made from another
    version of it or under other defaults.
    """
    for option, chosen in (("--arms", arms), ("--seeds", seeds)):
        if chosen is not None and not chosen:
            raise SpecError(f"{option} names none: omit it to use all of the spec's")
    if problem := seeds_problem(seeds or ()):
        raise SpecError(f"--seeds: {problem}")
    unknown = [arm for arm in arms or () if arm not in spec.arms]
    if unknown:
        raise SpecError(f"no arm is called {', '.join(unknown)}: the spec has {', '.join(spec.arms)}")
    chosen_arms = list(dict.fromkeys(arms or spec.arms))
    folders = [run_folder(out, arm, seed) for seed in (seeds or spec.seeds) for arm in chosen_arms]
    finished = finished_runs(out)
    for folder in finished:
        if folder.arm in chosen_arms and folder.made_from() not in {None, spec.digest(folder.arm)}:
            raise SpecError(
                f"{folder.path}: was made from another version of arm {folder.arm} in the spec: "
                "give the changed arm another name, or remove the folder"
            )
    todo = [folder for folder in folders if not folder.done]
    for arm in dict.fromkeys(folder.arm for folder in todo):
        _refuse_mixture(spec, arm, [folder for folder in finished if folder.arm == arm])
    return todo


def _refuse_mixture(spec: Spec, arm: str, finished: Sequence[RunFolder]) -> None:
    """Raise SpecError if a run made now would have different settings from the arm's finished
    runs. Runs of before settings were recorded are joined if the arm sets all that matters.
    """
    for folder in finished:
        made_with, now = folder.settings_digest(), settings_digest(resolved_settings(spec, arm))
        if made_with == now or (made_with is None and spec.settings == "bare"):
            continue
        raise SpecError(
            f"arm {arm}: defaults may have changed since its finished runs were made: {folder.path} was made by commit "
            f"{folder.commit()}, with the settings in {folder.path.parent / SETTINGS_FILE}. So as not to mix defaults in one arm, "
            "make it with that commit's code, or give the arm another name in the spec"
        )


def finished_runs(out: Path) -> list[RunFolder]:
    """Complete runs in a folder, by arm and seed."""
    found = []
    for done in sorted(out.glob(f"*/seed-*/{DONE_FILE}")):
        seed = done.parent.name.removeprefix("seed-")
        if seed.lstrip("-").isdigit():
            found.append(RunFolder(done.parent.parent.name, int(seed), done.parent))
    return sorted(found, key=lambda folder: (folder.arm, folder.seed))


def holds_manifest(out: Path, spec: Spec) -> bool:
    """Check whether a folder already has a manifest of this spec.

    Raises:
        SpecError: the folder holds the results of another spec.
    """
    file = out / MANIFEST_FILE
    if not file.is_file():
        return False
    before = json.loads(file.read_text(encoding="utf-8"))
    if _without_size(before["spec"]) != _without_size(spec.source) or before["driver"] != DRIVER:
        raise SpecError(
            f"{out} holds results of another spec: give another --out, or remove the folder. "
            "Only arms and seeds may be added to an experiment that has begun"
        )
    return True


def write_manifest(out: Path, spec: Spec) -> None:
    """Record what the results depend on.

    Raises:
        SpecError: the folder holds the results of another spec.
    """
    holds_manifest(out, spec)
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "name": spec.name,
        "question": spec.question,
        "baseline": spec.base_arm,
        "driver": DRIVER,
        "spec": spec.source,
        "commit": code_commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "written": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    replace_text(out / MANIFEST_FILE, json.dumps(content, indent=1) + "\n")


def read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of a results folder.

    Raises:
        SpecError: there is none.
    """
    try:
        manifest: dict[str, Any] = json.loads((out / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{out}: no manifest can be read ({error_text(error)}): give the folder that `swarm experiment run` wrote"
        ) from None
    return manifest


def _without_size(source: Mapping[str, Any]) -> dict[str, Any]:
    """A spec without the parts that may change later: seeds, wording, and arms, because each run's
    folder has its arm's digest.
    """
    return {key: value for key, value in source.items() if key not in {"seeds", "question", "baseline", "confirm", "arms"}}


@cache
def code_commit() -> str:
    """The commit of this code at the first call, with `-dirty` if files differ from the commit;
    `unknown` outside git.
    """
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


# Defaults may change while a spec's text stays the same. Runs made with different defaults do not
# belong to one arm.

_BESIDE_THE_RUN = {"node", "nats", "policy_store", "http", "log"}
"""Sections that contain only a node's place and name."""


def resolved_settings(spec: Spec, arm: str) -> dict[str, Any]:
    """For each kind of node, the number of nodes and all settings that affect the run; the same for
    all seeds.

    Raises:
        SpecError: a node's configuration cannot be used.
    """
    run = plan_run(spec, arm, 0)
    nodes: list[dict[str, Any]] = []
    for node in run.nodes:
        settings = {
            "role": node.role,
            **node.config.model_dump(mode="json", exclude=_BESIDE_THE_RUN),
        }
        if nodes and {**nodes[-1], "count": 1} == {**settings, "count": 1}:
            nodes[-1]["count"] += 1
        else:
            nodes.append({"count": 1, **settings})
    attack = run.attack.model_dump(mode="json")
    return {"rounds": run.rounds, "round_s": run.round_s, "delay_rounds": list(run.delay_rounds), "attack": attack, "nodes": nodes}


def settings_digest(settings: Mapping[str, Any]) -> str:
    """A digest of resolved settings in sixteen digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

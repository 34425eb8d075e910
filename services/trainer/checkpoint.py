"""Checkpoints on disk, and the state and position that they hold: written completely or not at all,
verified when read; the newest few and the best are kept.

A checkpoint is a folder `step-<number>` with the trained weights, the optimizer and a manifest with
a SHA-256 of each file and of itself. It is written under a temporary name, flushed to disk, and
renamed; a crash at any instant leaves the earlier ones intact.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor

from shared import atomic_files
from shared.contracts.control import EvalReport
from shared.model.weights import serialize
from shared.run_records import CHECKPOINT, checkpoint_steps


@dataclass(frozen=True, slots=True)
class LearnerState:
    """The part of a checkpoint that belongs to the learner. `optimizer` and `random` are plain
    containers of tensors and numbers.

    recent_norms: by which the gradients of foreign groups are bounded
    (`services.trainer.gradient.bounded_step`).
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    random: dict[str, Tensor]
    recent_norms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """A version of the policy, from the step that makes it until generators are told. Its number is
    that of the last batch that its weights contain, `batch_number`, which is at `stream_seq` of the
    batch log. consumed_local: local groups in all batches up to it.
    """

    batch_number: int = 0
    stream_seq: int = 0
    consumed_local: int = 0


MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.pt"
BEST = "best.json"
FORMAT = 1
_NOTE_BYTES = 2**24
"""More than a manifest or the note of the best evaluation has."""
_ASIDE = "corrupt-"
_UNFINISHED = ".unfinished-"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names cause and remedy."""


class Misplaced(CheckpointError):
    """An intact checkpoint of another step, run or node. It may be somebody's only one, so it is
    neither passed over nor renamed.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The model of a checkpoint's weights, so that they can be exported without the service's
    configuration.
    """

    model_path: str
    dtype: str
    lora_rank: int
    lora_alpha: float
    lora_target_modules: str | list[str]
    model_revision: str = ""
    """Commit of a hub name, `model.revision`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestEvaluation:
    """The best held-out result so far and the checkpoint nearest to the policy version that it was
    measured on. `pass_rate`: the mean reward where no pass is defined. `measure`: its questions,
    scorers and rule of what passes; results by another measure are no worse and no better.
    """

    pass_rate: float
    policy_version: int
    step: int
    measure: str = ""


def evaluation_measure(report: EvalReport) -> str:
    """The `measure` of an evaluation."""
    return f"{report.held_out} {report.scorer} {report.pass_rule}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and found intact. made_by: `<run>/<node>`, or empty, as the owner
    of its store.
    """

    folder: Path
    position: PolicyVersion
    model: TrainedModel
    state: LearnerState
    made_by: str = ""


class CheckpointStore:
    """The checkpoints of one node in one run, in `folder`. owner: that `<run>/<node>`, whose
    checkpoints alone are then read; empty: those of any.
    """

    def __init__(self, folder: Path, *, keep: int, keep_best: bool, owner: str = "") -> None:
        self.folder = folder
        self._owner = owner
        self._keep = keep
        self._keep_best = keep_best

    def steps(self) -> list[int]:
        return checkpoint_steps(self.folder)

    def save(self, state: LearnerState, position: PolicyVersion, model: TrainedModel) -> Path:
        """Write a checkpoint; call `prune` afterwards.

        Raises:
            OSError: the disk is full or not writable; earlier checkpoints are unchanged.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        final = self.path(position.batch_number)
        unfinished = self.folder / f"{_UNFINISHED}{os.getpid()}-{position.batch_number}"
        try:
            unfinished.mkdir()
            _write(unfinished, state, position, model, self._owner)
            if final.exists():
                shutil.rmtree(final)
            os.rename(unfinished, final)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        atomic_files.sync_path(self.folder)
        return final

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint, and why newer ones are broken (`set_aside` renames those);
        (None, []) if there is no checkpoint.

        Raises:
            Misplaced: the newest intact one is of another step, run or node.
            CheckpointError: there are checkpoints, and none is intact.
        """
        reasons: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.read(step), reasons
            except Misplaced:
                raise
            except CheckpointError as error:
                reasons.append(str(error))
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used ({'; '.join(reasons)}): restore one from a copy, or choose another "
                "node.run and node.id to start from the base policy"
            )
        return None, []

    def read(self, step: int) -> Checkpoint:
        """The checkpoint of one step.

        Raises:
            Misplaced: it is of another step, run or node.
            CheckpointError: it cannot be used.
        """
        found = read_checkpoint(self.path(step))
        made_at = found.position.batch_number
        if made_at != step:
            raise Misplaced(f"{found.folder} is of step {made_at}: rename it {self.path(made_at).name}, or move it away")
        if self._owner and found.made_by not in ("", self._owner):
            raise Misplaced(f"{found.folder} is of {found.made_by}, not of {self._owner}: move it there, and put this node's back")
        return found

    def positions(self) -> dict[int, PolicyVersion]:
        """The position of each checkpoint whose manifest can be read, by step, oldest first."""
        found: dict[int, PolicyVersion] = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                found[step] = _read_manifest(self.path(step)).position
        return found

    def set_aside(self, newer_than: int) -> None:
        """Rename the broken checkpoints of steps later than `newer_than`, so that they are no
        longer considered.
        """
        for step in self.steps():
            if step > newer_than:
                aside = self.folder / f"{_ASIDE}{self.path(step).name}"
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(self.path(step), aside)

    def note_evaluation(self, policy_version: int, pass_rate: float, *, tolerance: int, measure: str = "") -> bool:
        """Remember the checkpoint nearest to an evaluated version (at most `tolerance` steps off)
        if it is the best so far by its measure. No checkpoint is near the base policy, which no
        step has trained.

        Returns whether it is.
        """
        best, steps = self.best(), self.steps()
        if best is not None and best.step in steps and best.measure == measure and pass_rate <= best.pass_rate:
            return False
        near = [step for step in steps if policy_version and abs(step - policy_version) <= tolerance]
        if not near:
            return False
        step = min(near, key=lambda step: (abs(step - policy_version), -step))
        found = BestEvaluation(pass_rate=pass_rate, policy_version=policy_version, step=step, measure=measure)
        _write_file(self.folder / f"{BEST}.new", _json(asdict(found)))
        os.replace(self.folder / f"{BEST}.new", self.folder / BEST)
        return True

    def best(self) -> BestEvaluation | None:
        try:
            return BestEvaluation(**json.loads(_beginning(self.folder / BEST)))
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def replay_seq(self) -> int:
        """The position of the batch log up to which batches are no longer needed: the oldest of the
        newest `keep` checkpoints contains them.

        The best checkpoint is not considered, because it is kept only for export; otherwise the log
        would grow for as long as no better one comes. 0 (everything is needed) without a
        checkpoint, or if one of them cannot be read.
        """
        try:
            return min((_read_manifest(self.path(step)).position.stream_seq for step in self.steps()[-self._keep :]), default=0)
        except CheckpointError:
            return 0

    def prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self._keep :])
        best = self.best() if self._keep_best else None
        if best is not None:
            kept.add(best.step)
        for step in steps:
            if step not in kept:
                # Renamed first, so that a half-deleted folder is not taken for a checkpoint.
                doomed = self.folder / f"{_UNFINISHED}{self.path(step).name}"
                os.rename(self.path(step), doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _sweep(self) -> None:
        for pattern in (f"{_UNFINISHED}*", f"{_ASIDE}*"):
            for leftover in self.folder.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)

    def path(self, step: int) -> Path:
        return self.folder / f"{CHECKPOINT}{step:08d}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
    """
    manifest = _read_manifest(folder)
    payloads = {name: _read_checked(folder / name, manifest.sums.get(name, "")) for name in (WEIGHTS, OPTIMIZER)}
    try:
        rest = torch.load(io.BytesIO(payloads[OPTIMIZER]), weights_only=True, map_location="cpu")
        state = LearnerState(load(payloads[WEIGHTS]), rest["optimizer"], rest["random"], rest["recent_norms"])
    except (pickle.UnpicklingError, RuntimeError, KeyError, ValueError, EOFError) as error:
        raise CheckpointError(f"checkpoint {folder.name}: cannot be decoded ({error})") from None
    return Checkpoint(folder, manifest.position, manifest.model, state, manifest.made_by)


def _write(folder: Path, state: LearnerState, position: PolicyVersion, model: TrainedModel, made_by: str) -> None:
    """Write the files into `folder`, the manifest last, with their checksums and its own."""
    rest = io.BytesIO()
    torch.save({"optimizer": state.optimizer, "random": state.random, "recent_norms": state.recent_norms}, rest)
    payloads = {WEIGHTS: serialize(state.weights), OPTIMIZER: rest.getvalue()}
    for name, payload in payloads.items():
        _write_file(folder / name, payload)
    manifest = {
        "format": FORMAT,
        "position": asdict(position),
        "model": asdict(model),
        "made_by": made_by,
        "sha256": {name: hashlib.sha256(payload).hexdigest() for name, payload in payloads.items()},
    }
    _write_file(folder / MANIFEST, _json({**manifest, "self_sha256": hashlib.sha256(_json(manifest)).hexdigest()}))
    atomic_files.sync_path(folder)


class _Manifest(NamedTuple):
    position: PolicyVersion
    model: TrainedModel
    sums: dict[str, str]
    made_by: str


def _read_manifest(folder: Path) -> _Manifest:
    try:
        manifest: dict[str, Any] = json.loads(_beginning(folder / MANIFEST))
        claimed = manifest.pop("self_sha256")
        if hashlib.sha256(_json(manifest)).hexdigest() != claimed:
            raise ValueError("its own checksum differs")
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']} is not {FORMAT}")
        position, model = PolicyVersion(**manifest["position"]), TrainedModel(**manifest["model"])
        return _Manifest(position, model, manifest["sha256"], manifest["made_by"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder.name}: its manifest is missing or broken ({error})") from None


def _beginning(file: Path) -> bytes:
    """The first `_NOTE_BYTES` of a file: the run may be somebody else's, and the file endless."""
    with file.open("rb") as opened:
        return opened.read(_NOTE_BYTES)


def _read_checked(file: Path, sha256: str) -> bytes:
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {file.parent.name}: {file.name} cannot be read ({error})") from None
    found = hashlib.sha256(payload).hexdigest()
    if found != sha256:
        raise CheckpointError(
            f"checkpoint {file.parent.name}: {file.name} is torn or altered ({len(payload)} bytes, sha256 {found[:8]}.., "
            f"expected {sha256[:8]}..)"
        )
    return payload


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode()


def _write_file(file: Path, payload: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(payload)
        stream.flush()
        atomic_files.sync(stream.fileno())

"""Reads what a node's services wrote about single groups into the run's folder: how its trainer
used them, which ones its verifier refused, and some held-out answers. The files are bounded
(`shared.run_records`); an incomplete or unknown line is skipped.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.config import NodeConfig
from shared.json_lines import older
from shared.plain_files import NO_FILE, open_plain, read_plain_end, whole_lines
from shared.run_records import SAMPLES_FILE, TRAINED_FILE, TRAINED_MAX_BYTES, refused_files
from swarm_cli.file_names import FileNames, file_names
from swarm_cli.observe.plot import find_run
from swarm_cli.observe.snapshot import no_records
from swarm_cli.running import running_runs

T = TypeVar("T")
_MOST_BYTES = 2 * TRAINED_MAX_BYTES


class TrainedAnswer(msgspec.Struct, frozen=True):
    """How a step used one answer (`services.trainer.trained`)."""

    place: int
    advantage: float | None = None
    tokens: int | None = None
    kept: int | None = None
    weight: float | None = None
    clipped: float | None = None
    truncated: int | None = None
    ratio: float | None = None
    left_out: str | None = None
    token_ratio: list[float | None] | None = None
    token_weight: list[float | None] | None = None


class TrainedGroup(msgspec.Struct, frozen=True):
    """How a step used one group of its batch."""

    id: str
    origin: str
    sender: str
    fate: str
    factor: float | None = None
    bounded: float | None = None
    answers: list[TrainedAnswer] = []

    def answer(self, place: int) -> TrainedAnswer | None:
        """The answer at this place in the group."""
        return next((answer for answer in self.answers if answer.place == place), None)


class TrainedStep(msgspec.Struct, frozen=True):
    """One line of `trained.jsonl`."""

    step: int
    time: float
    updated: bool
    updates: int
    groups: list[TrainedGroup]
    groups_not_written: int = 0

    def group(self, group_id: str) -> TrainedGroup | None:
        """How the step used a group; None if the group was not in its batch."""
        return next((group for group in self.groups if group.id == group_id), None)


class RefusedExcerpt(msgspec.Struct, frozen=True):
    """The beginning of a refused group, if it could be decoded."""

    dataset: str
    seed: int
    index: int
    draw: int
    policy_version: int
    created_at: float
    question: str
    completions: int
    answers: list[str]


class Refusal(msgspec.Struct, frozen=True):
    """One line of `refused-<replica>.jsonl`. `id` is "" if no valid signature was found; then
    `claimed_id` is the id in the message's header.
    """

    time: float
    reason: str
    detail: str
    sender: str
    id: str
    claimed_id: str
    swarm_seq: int
    stored_at: float
    group: RefusedExcerpt | None = None


class HeldOutSample(msgspec.Struct, frozen=True):
    """One held-out answer."""

    dataset: str
    seed: int
    index: int
    question: str
    reference: str | None
    text: str
    characters: int
    reward: float | None
    tokens: int
    finish_reason: str
    passed: bool | None = None


class Samples(msgspec.Struct, frozen=True):
    """One line of `samples.jsonl`: some answers of one evaluation."""

    policy_version: int
    time: float
    samples: list[HeldOutSample]


def record_folder(config: NodeConfig, run: str) -> Path | None:
    """The node's folder in a run; by default in the only running run that has the node, else in the
    newest with records of it; None if this machine has none.

    Raises:
        CommandError: the named run is not on this machine, or the node has no folder in it.
    """
    node, var_dir = config.node.id, config.node.var_dir
    if run:
        folder = find_run(run, var_dir) / node
        if not folder.is_dir():
            raise no_records(folder.parent, [node])
        return folder
    here = [each / node for each in running_runs(var_dir) if (each / node).is_dir()]
    if len(here) == 1:
        return here[0]
    runs = var_dir / "runs"
    folders = [each / node for each in runs.iterdir()] if runs.is_dir() else []
    written = {folder: max((path.stat().st_mtime for path in _records(folder)), default=0.0) for folder in folders}
    newest = max(written, key=lambda folder: written[folder], default=None)
    return newest if newest is not None and written[newest] else None


def names_in_run(config: NodeConfig, run: str) -> FileNames:
    """The names of files in the run, by default in the newest with records of the node. As a name
    belongs to its rows, a wrong run gives no wrong one.
    """
    runs, newest = config.node.var_dir / "runs", None if run else record_folder(config, "")
    folder = next((each for each in (runs / run, Path(run)) if each.is_dir()), None) if run else newest and newest.parent
    return file_names(folder, config.tasks)


class TrainedRecords:
    """`trained.jsonl` of a folder, by step; if a step is in it twice, the later line counts. Reads
    only the lines added since the last read.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._lines: dict[int, bytes] = {}
        self._read_bytes = 0
        self._inode = -1

    def for_step(self, step: int) -> TrainedStep | None:
        """The trainer's record of a step; None if there is none or it is no longer kept."""
        self._read_on()
        line = self._lines.get(step)
        return None if line is None else _decoded(line, TrainedStep)

    @property
    def newest(self) -> int | None:
        """The last step on record, as of the last read."""
        return max(self._lines, default=None)

    def naming(self, prefix: str) -> list[TrainedStep]:
        """The steps with a group whose id begins with `prefix`."""
        self._read_on()
        wanted = f'"id":"{prefix}'.encode()
        found = (_decoded(line, TrainedStep) for line in self._lines.values() if wanted in line)
        return [each for each in found if each is not None]

    def _read_on(self) -> None:
        """Read the new lines; of a file longer than any trainer's, only the last. Another inode
        means that the file was rotated: then the older file, which holds what was read before, is
        read first.
        """
        if self.folder is None:
            return
        path = self.folder / TRAINED_FILE
        try:
            found = path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode):
            return
        if found.st_ino != self._inode:
            self._lines, self._read_bytes, self._inode = {}, 0, found.st_ino
            for line in _lines(older(path)):
                self._take(line)
        with open(open_plain(path), "rb") as file:
            start = max(self._read_bytes, found.st_size - _MOST_BYTES)
            for whole, end in whole_lines(file, start, TRAINED_MAX_BYTES):
                self._read_bytes = end
                for line in whole.splitlines():
                    self._take(line)

    def _take(self, line: bytes) -> None:
        """Keep a line by its step, which comes first in it (`services.trainer.trained`), so that
        the line need not be decoded.
        """
        head, _, rest = line.partition(b",")
        name, _, number = head.partition(b":")
        if name == b'{"step"' and number.isdigit() and rest.endswith(b"]}"):
            self._lines[int(number)] = line


def read_refusals(folder: Path | None) -> list[Refusal]:
    """The last refusals of all replicas of a node's verifier, oldest first."""
    lines = [line for path in (refused_files(folder) if folder is not None else []) for line in _lines(path)]
    found = [refusal for line in lines if (refusal := _decoded(line, Refusal)) is not None]
    return sorted(found, key=lambda refusal: refusal.time)


def read_samples(folder: Path | None) -> list[Samples]:
    """Held-out answers by policy version; if a version was evaluated again, the later
    line counts.
    """
    if folder is None:
        return []
    path = folder / SAMPLES_FILE
    by_version: dict[int, Samples] = {}
    for line in (*_lines(older(path)), *_lines(path)):
        samples = _decoded(line, Samples)
        if samples is not None:
            by_version[samples.policy_version] = samples
    return [by_version[version] for version in sorted(by_version)]


def _records(folder: Path) -> Iterator[Path]:
    for path in (folder / TRAINED_FILE, folder / SAMPLES_FILE, *refused_files(folder)):
        if path.is_file():
            yield path


def _lines(path: Path) -> list[bytes]:
    try:
        return read_plain_end(path, _MOST_BYTES)[0].splitlines()
    except OSError as error:
        if error.errno in NO_FILE:
            return []
        raise


def _decoded(line: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None

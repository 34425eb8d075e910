"""The records in a node's run folder that one program writes and another reads: their names, their
maximum sizes, and files with one JSON object per line. A line is appended completely or not at all;
a torn line, left by a kill or a full disk, is skipped.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from shared.contracts.control import EvalReport, TaskScore
from shared.plain_files import NO_FILE, open_plain, read_plain_end

MIB = 2**20

METRICS_FILE = "metrics.jsonl"
"""Every training step (`services.trainer.records`). It is never cut."""

EVAL_FILE = "eval.jsonl"
"""Every held-out evaluation (`services.generator.evaluation`). It is never cut."""

EVAL_SETS_FILE = "eval_sets.jsonl"
"""Every result on an evaluation set (`services.generator.evaluation_sets`). It is never cut."""

TRAINED_FILE = "trained.jsonl"
"""What each step trained on: groups, advantages, weights (`services.trainer.records`)."""
TRAINED_MAX_BYTES = 32 * MIB

BATCHES_FILE = "batches.jsonl"
"""The batches that the steps trained on, with all texts (`services.trainer.records`)."""
BATCHES_MAX_BYTES = 32 * MIB

SAMPLES_FILE = "samples.jsonl"
"""A few held-out answers of each evaluation (`services.generator.evaluation`)."""
SAMPLES_MAX_BYTES = 16 * MIB

FILE_NAMES_FILE = "files.jsonl"
"""Which file the rows of a dataset were read from (`services.generator.service`)."""
FILE_NAMES_MAX_BYTES = MIB

CHECKPOINTS = "checkpoints"
CHECKPOINT = "step-"
"""The folder of a node's checkpoints, and how the name of each begins, before its step
(`services.trainer.checkpoint`).
"""


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder`, in order, intact or not."""
    names = [path.name for path in folder.glob(f"{CHECKPOINT}*")] if folder.is_dir() else []
    return sorted(int(name[len(CHECKPOINT) :]) for name in names if name[len(CHECKPOINT) :].isdecimal())


def saved_step(run_dir: Path) -> int:
    """The step of a node's newest checkpoint; 0 without one."""
    return max(checkpoint_steps(run_dir / CHECKPOINTS), default=0)


_UNKNOWN = re.compile(r"unknown_rewards-[A-Za-z0-9-]{1,63}\.jsonl")
_REFUSED = re.compile(r"refused-[A-Za-z0-9-]{1,63}\.jsonl")


def unknown_file(run_dir: Path, replica: str) -> Path:
    """The file in which a verifier replica counts local answers whose reward is unknown, a line for
    each dataset and cause (`services.verifier.rewards`).
    """
    return run_dir / f"unknown_rewards-{replica}.jsonl"


def unknown_files(run_dir: Path) -> list[Path]:
    """These counts of all replicas."""
    return [path for path in run_dir.iterdir() if _UNKNOWN.fullmatch(path.name)] if run_dir.is_dir() else []


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


class RefusedGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of `refused-<replica>.jsonl`. sender: as the subject says, a claim; "" if there is
    none. id: of the signed bytes, "" if no valid signature was found; claimed_id: what a header
    says instead.
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


def refused_file(run_dir: Path, replica: str) -> Path:
    """The file in which a verifier replica records its latest refusals
    (`services.verifier.refused_messages`).
    """
    return run_dir / f"refused-{replica}.jsonl"


def refused_files(run_dir: Path) -> list[Path]:
    """The refusal records of all replicas, most recently written first."""
    if not run_dir.is_dir():
        return []
    found = [path for path in run_dir.iterdir() if _REFUSED.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True)


_MOST_BYTES = 2**28


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; [] if the file does not exist or is a link, pipe or device.
    A line that is torn or still being written is skipped. Of a file of more than 256 MiB only
    the end is read.
    """
    return [each for each in _values(path) if each is not None]


def unreadable(path: Path) -> str:
    """The number of lines of a JSON-lines file that hold no object, in words; empty if none does. A
    torn line is one of them.
    """
    lost = sum(each is None for each in _values(path))
    return f"{lost} line{'' if lost == 1 else 's'} of {path} cannot be read" if lost else ""


def _values(path: Path) -> list[dict[str, Any] | None]:
    """The object of each line that has an end; None for a line without one."""
    try:
        content, whole = read_plain_end(path, _MOST_BYTES)
    except OSError as error:
        if error.errno in NO_FILE:
            return []
        raise
    lines = content.decode("utf-8", "replace").splitlines()
    ended = content.endswith(b"\n")
    values: list[dict[str, Any] | None] = []
    for line in lines if whole else lines[1:]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if line.strip():
            values.append(value if isinstance(value, dict) else None)
    if values and values[-1] is None and not ended:
        values.pop()
    return values


def eval_report(node: str, line: Mapping[str, Any]) -> EvalReport | None:
    """The report of which the generator wrote a line of `eval.jsonl`; None for a line without a
    score. Earlier versions wrote fewer keys.
    """
    by_task: Any = line.get("per_task")
    per_task = {}
    for name, score in by_task.items() if isinstance(by_task, dict) else ():
        with suppress(msgspec.ValidationError, TypeError, AttributeError):
            per_task[name] = msgspec.convert({"n": 0, "mean_reward": score.get("pass_rate"), **score}, TaskScore)
    said = {
        "node": node,
        "policy_version": line.get("policy_version"),
        "created_at": line.get("time", 0.0),
        "n": line.get("n", 0),
        "pass_rate": line.get("pass_rate"),
        "mean_reward": line.get("mean_reward", line.get("pass_rate")),
        "unknown": line.get("unknown", 0),
        "per_task": per_task,
        "seconds": line.get("seconds", 0.0),
        "held_out": line.get("held_out"),
        "scorer": line.get("scorer"),
        "pass_rule": line.get("pass_rule"),
        "reward_values": line.get("reward_values", {}),
        "max_new_tokens": line.get("max_new_tokens"),
    }
    try:
        return msgspec.convert(said, EvalReport)
    except (msgspec.ValidationError, TypeError):
        return None


def reward_changes(scorers: Iterable[Any]) -> list[int]:
    """Count the changes of the rewards before each step, by the `scorer` of its line in
    `metrics.jsonl`. Mean rewards before and after a change cannot be compared, and those of a step
    that two rewards scored (null) with none of another scorer.
    """
    changes, newest = 0, None
    found: list[int] = []
    for scorer in scorers:
        changes += bool(found) and scorer != newest and (changes > 0 or newest is not None)
        newest = scorer
        found.append(changes)
    return found


def added_words(line: Mapping[str, Any]) -> str:
    """Say of a line of `eval_sets.jsonl` that its set was added during the run; empty if not."""
    step: Any = line.get("added_at")
    if not isinstance(step, int) or step <= 0:
        return ""
    return f"added at step {step:,}: earlier steps may have trained on its questions"


_GOES_ON_AFTER = "goes_on_after"


def eval_lines(path: Path) -> list[dict[str, Any]]:
    """The evaluations in `eval.jsonl`, without those of policies that are gone: of versions later
    than one from which training went on with other batches (`forget_evaluations_after`).
    """
    kept: list[dict[str, Any]] = []
    last = math.inf
    for line in reversed(read_jsonl(path)):
        version = line.get("policy_version")
        if isinstance(after := line.get(_GOES_ON_AFTER), int):
            last = min(last, after)
        elif not isinstance(version, int) or version <= last:
            kept.append(line)
    return kept[::-1]


def forget_evaluations_after(path: Path, version: int, time_s: float) -> None:
    """Append to `eval.jsonl` that the policies after `version` are gone. Their lines stay for
    people; readers leave them out.

    Raises:
        OSError: the line cannot be written.
    """
    with open_lines(path) as file:
        write_whole(file, json.dumps({_GOES_ON_AFTER: version, "time": time_s}).encode() + b"\n")


def open_lines(path: Path) -> FileIO:
    """Open a file of lines for appending; a torn last line is ended first. Open it for each line:
    in one that stays open, lines are lost once the file is deleted or replaced.

    Raises:
        OSError: the file cannot be opened, or is a link, a pipe, a device or a folder.
    """
    stream = FileIO(open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+")
    size_bytes = os.fstat(stream.fileno()).st_size
    if size_bytes and os.pread(stream.fileno(), 1, size_bytes - 1) != b"\n":
        write_whole(stream, b"\n")
    return stream


def write_whole(stream: FileIO, line: bytes) -> None:
    """Append `line`, which includes its newline, to a file opened for appending.

    Raises:
        OSError: such as a full disk; nothing of the line is left in the file.
    """
    size_bytes = os.fstat(stream.fileno()).st_size
    written = 0
    try:
        while written < len(line):
            written += stream.write(line[written:])
    except OSError:
        os.ftruncate(stream.fileno(), size_bytes)
        raise


class BoundedLines:
    """A file of lines that never takes more space than twice `max_bytes`. When it is full it is
    renamed `<name>.old`, replacing the previous one, and a new file begins, as one does where
    somebody deleted it.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open nothing before the first line, so that an unwritable folder loses only the lines."""
        self._path = path
        self._max_bytes = max_bytes

    def append(self, line: str) -> None:
        """Append one line, given without its newline. A line longer than `max_bytes` is dropped.

        Raises:
            OSError: such as a full disk; nothing of the line is left in the file.
        """
        content = line.encode() + b"\n"
        if len(content) > self._max_bytes:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if self._path.lstat().st_size + len(content) > self._max_bytes:
                os.replace(self._path, older(self._path))
        with open_lines(self._path) as stream:
            write_whole(stream, content)


def older(path: Path) -> Path:
    """The file in which `BoundedLines` keeps the lines that precede those of `path`."""
    return path.with_name(path.name + ".old")


def read_bounded(path: Path) -> list[dict[str, Any]]:
    """All objects that `BoundedLines` keeps, oldest first."""
    return [*read_jsonl(older(path)), *read_jsonl(path)]

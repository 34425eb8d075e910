"""A run's folder: the held-out results, training steps and unknown rewards that its processes
recorded, one JSON object per line.
"""

from __future__ import annotations

import contextlib
import json
import stat
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.contracts.control import EvalReport
from shared.plain_files import NO_FILE, read_plain_end
from shared.run_records import EVAL_FILE, METRICS_FILE, read_jsonl, unknown_files

TAIL_BYTES = 65_536
"""Far longer than a line."""
_OF_UPDATES = (
    *("loss", "grad_norm", "entropy", "clip_fraction", "importance_ratio", "importance_ratio_max", "importance_weight"),
    *("truncated_fraction", "dropped_fraction", "kl_behaviour", "kl_reference"),
)
"""Fields that a step measures only where there is something to learn."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One held-out evaluation: `pass_rate` of `n` tasks by `policy_version`; None: no pass is
    defined for one of the sources, so `mean_reward` counts. `by_task`: the same by dataset, if the
    file has it; `by_reward`: the datasets whose value there is a mean reward. `unknown`: answers
    without a known reward, which are not among the `n`.
    """

    policy_version: int
    pass_rate: float | None
    n: int
    by_task: Mapping[str, float] = field(default_factory=dict)
    mean_reward: float | None = None
    by_reward: frozenset[str] = frozenset()
    unknown: int = 0

    @classmethod
    def of(cls, report: EvalReport) -> Evaluation:
        """The overall result of a report."""
        return cls(report.policy_version, report.pass_rate, report.n, {}, report.mean_reward, unknown=report.unknown)

    def __str__(self) -> str:
        """The score, such as `0.412`, or `0.412r` for a mean reward (`NO_PASS_SHOWN`)."""
        if not self.n and self.unknown:
            return "unknown"
        if self.pass_rate is not None:
            return f"{self.pass_rate:.3f}"
        return "–" if self.mean_reward is None else f"{self.mean_reward:.3f}r"


NO_PASS_SHOWN = "no pass is defined, so held-out results are mean rewards (r): set pass_at in the [[tasks]] entry for a pass rate"


def scored(evaluations: Sequence[Evaluation]) -> list[tuple[Evaluation, float]]:
    """The evaluations that can be compared with the newest, each with its pass rate, or its mean
    reward if the newest has no pass rate.
    """
    known = [each for each in evaluations if each.n or not each.unknown]
    if known and known[-1].pass_rate is None:
        return [(each, each.mean_reward) for each in known if each.mean_reward is not None]
    return [(each, each.pass_rate) for each in known if each.pass_rate is not None]


def gain_of(newest: Evaluation | None, base: Evaluation | None) -> float | None:
    """How much better the newest is, by the measure that it has; None if that is not known."""
    values = [value for _, value in scored([base, newest])] if newest and base else []
    return values[1] - values[0] if len(values) == 2 else None


def read_steps(node_dir: Path) -> list[dict[str, Any]]:
    """A node's training steps in order. If a resumed trainer repeated a step, the later line
    counts.
    """
    by_step = {
        int(line["step"]): _measured(_without_huge(line))
        for line in read_jsonl(node_dir / METRICS_FILE)
        if _is_number(line.get("step"))
    }
    return [by_step[step] for step in sorted(by_step)]


def newest_step(node_dir: Path) -> dict[str, Any]:
    """The newest training step, read from the end of the file; {} before the first."""
    try:
        lines = read_plain_end(node_dir / METRICS_FILE, TAIL_BYTES)[0].decode("utf-8", "replace").splitlines()
    except OSError as error:
        if error.errno in NO_FILE:
            return {}
        raise
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                return _measured(_without_huge(value))
    return {}


def _measured(line: dict[str, Any]) -> dict[str, Any]:
    """`line` with None for what its step did not measure. Trainers used to write 0 there, which is
    no entropy or loss to average. They wrote 0 for the importance ratio too, which tells such a
    line: measured it is above 0.
    """
    if line.get("updated") is not False or line.get("importance_ratio") != 0:
        return line
    return {key: None if key in _OF_UPDATES else value for key, value in line.items()}


def _without_huge(line: dict[str, Any]) -> dict[str, Any]:
    """`line` without the integers that no float can hold, which no trainer writes."""
    return {key: value for key, value in line.items() if not isinstance(value, int) or abs(value) < 2**63}


def read_evaluations(node_dir: Path) -> list[Evaluation]:
    """A node's evaluations in order of policy version; if one was repeated, the later
    line counts. The file is read again only when it has changed.
    """
    file = node_dir / EVAL_FILE
    try:
        found = file.lstat()
    except OSError:
        return []
    return list(_evaluations(file, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=64)
def _evaluations(file: Path, inode: int, size: int, changed: int) -> tuple[Evaluation, ...]:
    """Read the file; the other arguments are its identity, by which a change is seen."""
    by_version = {}
    for line in read_jsonl(file):
        version: Any = line.get("policy_version")
        pass_rate: Any = line.get("pass_rate")
        n: Any = line.get("n", 0)
        mean: Any = line.get("mean_reward")
        unknown: Any = line.get("unknown", 0)
        nothing_known = pass_rate is None and mean is None and _is_number(unknown) and unknown > 0
        without_pass = pass_rate is None and (_is_number(mean) or nothing_known)
        if _is_number(version) and (_is_share(pass_rate) or without_pass) and _is_number(n) and n >= 0:
            by_task, by_reward = _by_task(line.get("per_task"))
            by_version[int(version)] = Evaluation(
                int(version),
                None if without_pass else float(pass_rate),
                int(n),
                by_task,
                float(mean) if _is_number(mean) else None,
                by_reward,
                int(unknown) if _is_number(unknown) else 0,
            )
    return tuple(by_version[version] for version in sorted(by_version))


def read_unknown(node_dir: Path) -> Counter[tuple[str, str]]:
    """How many local answers left their groups because their reward is unknown, by dataset and
    cause, as all replicas of the node's verifier have counted them.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for line in (line for path in unknown_files(node_dir) for line in read_jsonl(path)):
        answers: Any = line.get("answers")
        if _is_number(answers) and answers > 0:
            counts[str(line.get("dataset")), str(line.get("cause"))] += int(answers)
    return counts


def _by_task(scores: Any) -> tuple[dict[str, float], frozenset[str]]:
    """The results by dataset, and which of them are mean rewards."""
    if not isinstance(scores, dict):
        return {}, frozenset()
    found: dict[str, float] = {}
    by_reward = set()
    for name, score in sorted(scores.items()):
        rate: Any
        mean: Any
        rate, mean = (score.get("pass_rate"), score.get("mean_reward")) if isinstance(score, dict) else (None, None)
        if _is_share(rate):
            found[name] = float(rate)
        elif rate is None and _is_number(mean):
            found[name] = float(mean)
            by_reward.add(name)
    return found, frozenset(by_reward)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_number(value: Any) -> bool:
    """Whether `value` is a number that fits into 64 bits, which JSON's need not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


# Scores by held-out set, for the leaderboard. The swarm may not have them: a verifier passes on the
# newest evaluation every two seconds, and a short run has several in that time; the last one of a
# run may come when its verifier has ended; and a node without a swarm passes on none.

SETS_KEPT = 64
TASKS_KEPT = 8
REPORTS_KEPT = 4096
"""The newest of a node and set."""


class Recorded(NamedTuple):
    """A node's scores on one held-out set. newest: the last one that it recorded; every: the newest
    `REPORTS_KEPT` in the order of the file, and before them the base policy's.
    """

    base: EvalReport | None
    newest: EvalReport
    every: tuple[EvalReport, ...] = ()


BySet = Mapping[tuple[str, int], Recorded]
"""By the id of the held-out set ("" if unknown) and the number of tasks."""
ByNode = Mapping[str, BySet]
NO_SETS: BySet = {}
NO_NODES: ByNode = {}


class RecordedScores:
    """Reads a node's file again when it has changed."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, Path], tuple[tuple[int, int], dict[tuple[str, int], Recorded]]] = {}

    def read(self, folders: Mapping[str, Path]) -> dict[str, BySet]:
        """The scores in these folders, by node. If the base policy was evaluated on a set again,
        the later line counts.
        """
        self._read = {each: found for each in folders.items() if (found := self._of(*each)) is not None}
        return {node: found for (node, _), (_, found) in self._read.items()}

    def _of(self, node: str, folder: Path) -> tuple[tuple[int, int], dict[tuple[str, int], Recorded]] | None:
        """The file's identity, by which a change is seen, and its scores."""
        try:
            found = (folder / EVAL_FILE).lstat()
            if not stat.S_ISREG(found.st_mode):
                return None
            state = found.st_ino, found.st_size
            known = self._read.get((node, folder))
            return known if known is not None and known[0] == state else (state, _scores(node, folder))
        except OSError:
            return None


def _scores(node: str, folder: Path) -> dict[tuple[str, int], Recorded]:
    scores: dict[tuple[str, int], Recorded] = {}
    every: dict[tuple[str, int], deque[EvalReport]] = {}
    for each in read_jsonl(folder / EVAL_FILE):
        try:
            report = _report(node, each)
        except (msgspec.ValidationError, TypeError):
            continue
        key = (report.held_out or "", report.n + report.unknown)
        if key in scores or len(scores) < SETS_KEPT:
            before = scores[key].base if key in scores else None
            scores[key] = Recorded(report if report.policy_version == 0 else before, report)
            every.setdefault(key, deque(maxlen=REPORTS_KEPT)).append(report)
    return {key: each._replace(every=_with_base(each.base, every[key])) for key, each in scores.items()}


def _with_base(base: EvalReport | None, newest: Sequence[EvalReport]) -> tuple[EvalReport, ...]:
    """The newest reports, and the base policy's first if newer ones have pushed it out: every gain
    is measured against it.
    """
    return (base, *newest) if base is not None and base not in newest else tuple(newest)


def _report(node: str, line: Mapping[str, Any]) -> EvalReport:
    """The report of which the generator wrote this line. Earlier versions wrote fewer keys."""
    per_task = line.get("per_task", {})
    said = {
        "node": node,
        "policy_version": line.get("policy_version"),
        "created_at": line.get("time", 0.0),
        "n": line.get("n"),
        "pass_rate": line.get("pass_rate"),
        "mean_reward": line.get("mean_reward", line.get("pass_rate")),
        "unknown": line.get("unknown", 0),
        "per_task": dict(list(per_task.items())[:TASKS_KEPT]) if isinstance(per_task, dict) else {},
        "seconds": line.get("seconds", 0.0),
        "held_out": line.get("held_out"),
    }
    return msgspec.convert(said, EvalReport)

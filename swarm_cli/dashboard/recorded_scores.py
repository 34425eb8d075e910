"""The held-out scores that the nodes of a run on this machine recorded (`eval.jsonl`): the base
policies' and the newest. The swarm may not have them: a verifier passes on the newest evaluation
every two seconds, and a short run has several in that time; the last one of a run may come when its
verifier has ended; and a node without a swarm passes on none.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.contracts.control import EvalReport
from shared.json_lines import read_jsonl
from shared.run_records import EVAL_FILE

SETS_KEPT = 64
TASKS_KEPT = 8


class Recorded(NamedTuple):
    """A node's scores on one held-out set. newest: the last one that it recorded."""

    base: EvalReport | None
    newest: EvalReport


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
    for each in read_jsonl(folder / EVAL_FILE):
        try:
            report = _report(node, each)
        except (msgspec.ValidationError, TypeError):
            continue
        key = (report.held_out or "", report.n + report.unknown)
        if key in scores or len(scores) < SETS_KEPT:
            before = scores[key].base if key in scores else None
            scores[key] = Recorded(report if report.policy_version == 0 else before, report)
    return scores


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

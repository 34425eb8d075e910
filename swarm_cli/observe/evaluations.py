"""Held-out results and training steps from a run's folder: `eval.jsonl` and `metrics.jsonl`, one
object per line.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.json_lines import read_jsonl
from shared.plain_files import NO_FILE, read_plain_end
from shared.run_records import EVAL_FILE, METRICS_FILE

TAIL_BYTES = 65_536
"""Far longer than a line."""
_OF_UPDATES = (
    *("loss", "grad_norm", "entropy", "clip_fraction", "importance_ratio", "importance_ratio_max", "importance_weight"),
    *("truncated_fraction", "dropped_fraction", "kl_behaviour", "kl_reference"),
)
"""Fields that a step measures only where there is something to learn."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One held-out evaluation: `pass_rate` of `n` tasks by `policy_version`. `by_task`: pass rates
    by dataset, if the file has them. `mean_reward`: for datasets with partial credit, where no
    answer may pass.
    """

    policy_version: int
    pass_rate: float
    n: int
    by_task: Mapping[str, float] = field(default_factory=dict)
    mean_reward: float | None = None


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
    line counts.
    """
    by_version = {}
    for line in read_jsonl(node_dir / EVAL_FILE):
        version: Any = line.get("policy_version")
        pass_rate: Any = line.get("pass_rate")
        n: Any = line.get("n", 0)
        if _is_number(version) and _is_share(pass_rate) and _is_number(n) and n >= 0:
            mean: Any = line.get("mean_reward")
            by_version[int(version)] = Evaluation(
                int(version), float(pass_rate), int(n), _by_task(line.get("per_task")), float(mean) if _is_number(mean) else None
            )
    return [by_version[version] for version in sorted(by_version)]


def _by_task(scores: Any) -> dict[str, float]:
    if not isinstance(scores, dict):
        return {}
    rates: dict[str, Any] = {name: score.get("pass_rate") for name, score in scores.items() if isinstance(score, dict)}
    return {name: float(rate) for name, rate in sorted(rates.items()) if _is_share(rate)}


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_number(value: Any) -> bool:
    """Whether `value` is a number that fits into 64 bits, which JSON's need not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63

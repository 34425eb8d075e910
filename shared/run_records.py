"""Names, and maximum sizes where there is one, of the records in a node's run folder that one
program writes and another reads: files with one JSON object per line (`shared.json_lines`).
"""

from __future__ import annotations

import re
from pathlib import Path

MIB = 2**20

METRICS_FILE = "metrics.jsonl"
"""Every training step (`services.trainer.records`). It is never cut."""

EVAL_FILE = "eval.jsonl"
"""Every held-out evaluation (`services.generator.evaluation`). It is never cut."""

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

"""Writes which file a dataset's rows were read from: `files.jsonl`, for the commands and the page
of this machine. Messages name such a dataset by the hash of its rows alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from shared.config import TaskSpec
from shared.json_lines import BoundedLines, read_bounded
from shared.run_records import FILE_NAMES_FILE, FILE_NAMES_MAX_BYTES


def record_file_names(run_dir: Path, sources: Iterable[TaskSpec]) -> None:
    """Append a line for each file that has another name than when it was last read.

    sources: with each file's `dataset` set to the name of its rows.

    Raises:
        OSError: a line cannot be written.
    """
    names = {spec.dataset: spec.file_name for spec in sources if spec.source == "file"}
    if not names:
        return
    path = run_dir / FILE_NAMES_FILE
    known = {str(line.get("dataset")): line.get("file") for line in read_bounded(path)}
    lines = BoundedLines(path, FILE_NAMES_MAX_BYTES)
    try:
        for dataset, name in names.items():
            if known.get(dataset) != name:
                lines.append(json.dumps({"dataset": dataset, "file": name}, separators=(",", ":")))
    finally:
        lines.close()

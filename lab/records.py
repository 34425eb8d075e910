"""Writes and reads raw records: one JSON object per line, compressed. Everything in a report is
computed from them.

`kind` is the type of a line. Only `lab.report` reads them. Floats are rounded, which keeps a run
near 200 kB.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDS_FILE = "records.jsonl.gz"
SIGNIFICANT = 6


class RecordWriter:
    """Writes a run's records, starting a new file."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A fixed time and no name in the header, so that the same records give the same bytes.
        self._raw = file.open("wb")
        self._stream = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw, mtime=0)

    def write(self, kind: str, **values: Any) -> None:
        """Add a line. Numbers are rounded to six decimals; non-finite ones become null."""
        self._stream.write(json.dumps({"kind": kind, **rounded(values)}, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Finish the file."""
        self._stream.close()
        self._raw.close()


def rounded(value: Any) -> Any:
    """`value` with its floats rounded as they are stored."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        kept = round(value, SIGNIFICANT)
        return int(kept) if kept == int(kept) and abs(kept) < 2**53 else kept
    return value


def read_records(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a finished file.

    Raises: ValueError: the file is incomplete; the message names it.
    """
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except (EOFError, OSError, ValueError) as error:
        raise ValueError(f"records {file} cannot be read ({error}): remove their folder and run that arm and seed again") from None

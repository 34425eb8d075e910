"""The table of architectures in `docs/models.md`: `python -m tests.architectures.table [NAME...]`
tries them, and writes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import __version__

from tests.architectures.checks import findings
from tests.architectures.tiny import ARCHITECTURES, NotSmall

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_BEGIN = "<!-- architectures: written by `python -m tests.architectures.table` -->"
_HEAD = "| architecture | engine | trainer | why |\n|---|---|---|---|"


def table_row(kind: str) -> str:
    """One line of the table, found out anew. Measured numbers are left out: they differ from
    machine to machine.
    """
    try:
        engine, trainer = findings(kind)
    except NotSmall as reason:
        return f"| `{kind}` | not tried | not tried | {_words(str(reason))} |"
    why = [f"{side}: {_words(found.reason)}" for side, found in (("engine", engine), ("trainer", trainer)) if found.reason]
    return f"| `{kind}` | {engine.way or 'refused'} | {trainer.way or 'refused'} | {'; '.join(why)} |"


def committed_rows() -> dict[str, str]:
    """The lines of the committed table, by architecture."""
    lines = PAGE.read_text().partition(_BEGIN)[2].splitlines()
    return {match[1]: line for line in lines if (match := re.match(r"\| `([^`]+)` \|", line))}


def write_table(chosen: Sequence[str]) -> None:
    """Try the chosen architectures and replace their lines in the page; the others' lines stay."""
    rows = committed_rows()
    for kind in chosen:
        rows[kind] = table_row(kind)
        print(rows[kind], flush=True)
    lines = [rows[kind] for kind in ARCHITECTURES]
    text = PAGE.read_text().partition(_BEGIN)[0]
    tried = sum("| not tried |" not in line for line in lines)
    counted = f"transformers {__version__}: {len(lines)} architectures, {tried} of them tried."
    PAGE.write_text("\n".join([text + _BEGIN, "", counted, "", _HEAD, *lines, ""]))


def _words(reason: str) -> str:
    without_numbers = re.sub(r" \([^()]*\d[^()]*\)", "", reason)
    return re.sub(r"\s+", " ", without_numbers).replace("|", "/").strip()


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_table(sys.argv[1:] or ARCHITECTURES)

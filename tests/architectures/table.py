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
_HEAD = "| engine | trainer | why | architectures |\n|---|---|---|---|"


def outcome(kind: str) -> str:
    """The first cells of an architecture's row, found out anew. Measured numbers are left out: they
    differ from machine to machine.
    """
    try:
        engine, trainer = findings(kind)
    except NotSmall:
        return "| not tried | not tried | |"
    why = [f"{side}: {_words(found.reason)}" for side, found in (("engine", engine), ("trainer", trainer)) if found.reason]
    return f"| {engine.way or 'refused'} | {trainer.way or 'refused'} | {'; '.join(why).replace(f' ({kind})', '')} |".replace(
        "|  |", "| |"
    )


def committed_outcomes() -> dict[str, str]:
    """The first cells of the committed table, by architecture."""
    rows = re.findall(r"^(\|.*\|) (`.*`) \|$", PAGE.read_text().partition(_BEGIN)[2], re.MULTILINE)
    return {kind: cells for cells, kinds in rows for kind in re.findall(r"`([^`]+)`", kinds)}


def write_table(chosen: Sequence[str]) -> None:
    """Try the chosen architectures and write the page's table; what is known of others stays."""
    found = committed_outcomes()
    for kind in chosen:
        found[kind] = outcome(kind)
        print(kind, found[kind], flush=True)
    alike: dict[str, list[str]] = {}
    for kind in ARCHITECTURES:
        alike.setdefault(found[kind], []).append(f"`{kind}`")
    lines = [f"{cells} {', '.join(kinds)} |" for cells, kinds in sorted(alike.items(), key=lambda each: -len(each[1]))]
    tried = sum("| not tried |" not in found[kind] for kind in ARCHITECTURES)
    counted = f"transformers {__version__}: {len(ARCHITECTURES)} architectures, {tried} of them tried."
    text = PAGE.read_text().partition(_BEGIN)[0]
    PAGE.write_text("\n".join([text + _BEGIN, "", counted, "", _HEAD, *lines, ""]))


def _words(reason: str) -> str:
    without_numbers = re.sub(r" \((?:[^()]*\d[^()]*|\w+Error: [^()]*)\)", "", reason)
    return re.sub(r"\s+", " ", without_numbers).replace("|", "/").strip()


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_table(sys.argv[1:] or ARCHITECTURES)

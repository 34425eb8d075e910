"""Renders the table of floors for commands and reports."""

from __future__ import annotations

from collections.abc import Sequence

from lab.floors import OUT_FROM, Floor

_MOST_CHARS = 40


def floors_table(floors: Sequence[Floor]) -> str:
    """Markdown with one row per source."""
    lines = [
        f"| dataset | best constant | pass rate | best copy | pass rate | out ({OUT_FROM:g} or more) |",
        "|---|---|---|---|---|---|",
        *(
            f"| {floor.dataset} | {_shown(floor.constant)} | {floor.constant_rate:.3f} | {_shown(floor.copy)} | "
            f"{floor.copy_rate:.3f} | {'**out**' if floor.out else ''} |"
            for floor in floors
        ),
    ]
    return "\n".join(lines) + "\n"


def out_lines(floors: Sequence[Floor]) -> list[str]:
    """For a terminal: a sentence for each excluded dataset, or one saying that there is none."""
    found = [
        f"{floor.dataset} is out: the constant {_shown(floor.constant, table=False)} has a pass rate of {floor.constant_rate:.2f}; "
        "see the columns named screened"
        for floor in floors
        if floor.out
    ]
    return found or ["no dataset is out"]


def _shown(answer: str, *, table: bool = True) -> str:
    """Inline code on one line, with the characters escaped that have a meaning in a table."""
    text = answer if len(answer) <= _MOST_CHARS else answer[: _MOST_CHARS - 1] + "…"
    text = text.replace("\n", "\\n").replace("`", "'")
    return "`" + ((text.replace("|", "\\|") if table else text) or "(nothing)") + "`"

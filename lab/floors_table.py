"""The table of floors, as commands and reports show it."""

from __future__ import annotations

from collections.abc import Sequence

from lab.floors import OUT_FROM, Floor

_MOST_CHARS = 40


def floors_table(floors: Sequence[Floor]) -> str:
    """Markdown, a row a source."""
    lines = [
        f"| dataset | best constant | passes | best copy | passes | out (from {OUT_FROM:g}) |",
        "|---|---|---|---|---|---|",
        *(
            f"| {floor.dataset} | {_shown(floor.constant)} | {floor.constant_rate:.3f} | {_shown(floor.copy)} | "
            f"{floor.copy_rate:.3f} | {'**out**' if floor.out else ''} |"
            for floor in floors
        ),
    ]
    return "\n".join(lines) + "\n"


def out_lines(floors: Sequence[Floor]) -> list[str]:
    """A sentence for each dataset that is out, for a terminal; one if none is."""
    found = [
        f"{floor.dataset} is out: {_shown(floor.constant, table=False)} passes {floor.constant_rate:.2f}; "
        "see the columns called screened"
        for floor in floors
        if floor.out
    ]
    return found or ["no dataset is out"]


def _shown(answer: str, *, table: bool = True) -> str:
    """As code, in one line, with what a table would read as its own escaped."""
    text = answer if len(answer) <= _MOST_CHARS else answer[: _MOST_CHARS - 1] + "…"
    text = text.replace("\n", "\\n").replace("`", "'")
    return "`" + ((text.replace("|", "\\|") if table else text) or "(nothing)") + "`"

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


def _shown(answer: str) -> str:
    """As code, in one line, with what a table would read as its own escaped."""
    text = answer if len(answer) <= _MOST_CHARS else answer[: _MOST_CHARS - 1] + "…"
    return "`" + (text.replace("\n", "\\n").replace("`", "'").replace("|", "\\|") or "(nothing)") + "`"

"""Write the border's checks as a table to docs/security.md: `python -m monitoring.border_doc`."""

from __future__ import annotations

from pathlib import Path

from services.verifier.refusals import CHECKS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- begin: table of checks -->", "<!-- end: table of checks -->"


def table() -> str:
    """Markdown, one row per check, in order; a stage is named only in its first check's row."""
    rows = ["| | checked | refused as | because | blamed |", "|---|---|---|---|---|"]
    stage = None
    for number, check in enumerate(CHECKS, 1):
        named = check.stage.value if check.stage is not stage else ""
        rows.append(f"| {number} | {named} | `{check.refusal.value}` | {check.fails} | {check.blamed} |")
        stage = check.stage
    return "\n".join(rows)


def with_table(page: str) -> str:
    """`page` with the current table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))

"""Write the border's checks as a list to docs/security.md: `python -m monitoring.border_doc`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from textwrap import fill

import services.verifier.border  # noqa: F401 (fills the list)
from services.verifier.checks import CHECKS, Check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- begin: checks, by monitoring.border_doc -->", "<!-- end: checks -->"


def _row(check: Check) -> str:
    blamed = "" if check.blamed == "nobody" else f" (**blamed**: {check.blamed})"
    return fill(f"- `{check.refusal.value}`: {check.fails}{blamed}", 100, subsequent_indent="  ", break_on_hyphens=False)


def checks() -> str:
    """Markdown: a list for each stage, in order."""
    stages = groupby(CHECKS, key=lambda check: check.stage.value)
    return "\n\n".join("\n".join([f"{stage.capitalize()}:", "", *map(_row, found)]) for stage, found in stages)


def with_checks(page: str) -> str:
    """`page` with the current checks between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{checks()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_checks(PAGE.read_text()))

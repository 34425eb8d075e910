"""The runbooks that alerts lead to. They are served from the source tree: a package has none of the
documentation.
"""

from __future__ import annotations

from pathlib import Path

from shared.text import visible, visible_json

RUNBOOKS = "docs/runbooks"
FOLDER = Path(__file__).parents[2] / RUNBOOKS


def runbook(name: str, folder: Path = FOLDER) -> tuple[int, bytes]:
    """Status and JSON: the text of an alert's runbook, or where it is if it is not here."""
    known = {file.stem: file for file in folder.glob("*.md")}
    if name in known:
        return 200, visible_json({"name": name, "text": known[name].read_text(encoding="utf-8")}).encode()
    if not known:
        where = f"`{RUNBOOKS}/{visible(name, 80)}.md` in the source of this software: the installed package does not hold it"
        return 404, visible_json({"problem": f"This alert's runbook is {where}"}).encode()
    return 404, visible_json({"problem": f"There is no runbook {visible(name, 80)}"}).encode()

"""One word for one thing: what docs/glossary.md says not to write is in no code, setting, metric,
error or page.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = "docs/glossary.md"
# Records and what describes them stay as they were written.
LEFT_ALONE = ("experiments/", "docs/results-earlier.md", "CHANGELOG.md", "tests/unit/test_glossary.py", GLOSSARY)
ROW = re.compile(r"^\|[^|]*\|[^|]*\|([^|]*)\|$")


def refused_words() -> list[str]:
    rows = [ROW.match(line) for line in (ROOT / GLOSSARY).read_text().splitlines()]
    return [word for row in rows if row for word in re.findall(r'"([^"]+)"', row[1])]


def texts() -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.toml", "*.yaml", "*.json", "Makefile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.splitlines() if not name.startswith(LEFT_ALONE) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text() for name in names}


def occurrences(word: str, text: str) -> list[int]:
    """Line numbers. A phrase may be broken over two lines, in a comment or a string."""
    between = r'(?:\s|["#*])+'
    pattern = re.compile(rf"(?<![\w'-])(?:{between.join(map(re.escape, word.split()))})(?![\w-])", re.IGNORECASE)
    return [text.count("\n", 0, found.start()) + 1 for found in pattern.finditer(text)]


@pytest.fixture(scope="module")
def everything() -> dict[str, str]:
    return texts()


def test_the_glossary_refuses_something_and_there_is_something_to_look_at(everything: dict[str, str]) -> None:
    assert len(refused_words()) > 15
    assert len(everything) > 400
    assert occurrences("own groups", 'x = 1\n# The own\n# groups of a node\n"own "\n"groups"') == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("word", refused_words())
def test_a_word_that_the_glossary_refuses_is_nowhere(word: str, everything: dict[str, str]) -> None:
    found = [f"{name}:{line}" for name, text in everything.items() for line in occurrences(word, text)]
    assert not found, f"{GLOSSARY} says not to write {word!r}: {', '.join(found[:20])}"

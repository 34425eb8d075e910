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


def any_of(words: list[str]) -> re.Pattern[str]:
    """Finds each of the words in lower-case text. A phrase may be broken over two lines, in a
    comment or a string.
    """
    between = r'(?:\s|["#*])+'
    phrases = "|".join(between.join(map(re.escape, word.lower().split())) for word in words)
    return re.compile(rf"(?<![\w'-])(?:{phrases})(?![\w-])")


def occurrences(words: re.Pattern[str], text: str) -> list[tuple[int, str]]:
    """Line numbers, each with what stands there."""
    lowered = text.lower()
    return [(lowered.count("\n", 0, found.start()) + 1, found[0]) for found in words.finditer(lowered)]


@pytest.fixture(scope="module")
def everything() -> dict[str, str]:
    return texts()


def test_the_glossary_refuses_something_and_there_is_something_to_look_at(everything: dict[str, str]) -> None:
    assert len(refused_words()) > 15
    assert len(everything) > 400


def test_each_refused_word_is_found_also_in_capitals_and_over_two_lines() -> None:
    words = any_of(refused_words())
    for word in refused_words():
        assert occurrences(words, f"x\n{word.upper()}.") == [(2, word)]
    assert [line for line, _ in occurrences(words, 'x = 1\n# The own\n# groups of a node\n"own "\n"groups"')] == [2, 4]


def test_no_word_that_the_glossary_refuses_is_written_anywhere(everything: dict[str, str]) -> None:
    words = any_of(refused_words())
    found = [f"{name}:{line}: {word!r}" for name, text in everything.items() for line, word in occurrences(words, text)]
    assert not found, f"{GLOSSARY} says not to write: {', '.join(found[:20])}"

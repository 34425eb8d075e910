"""One word for one thing: what docs/glossary.md says not to write is in no code, setting, metric,
error or page, and in no name of any of them.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = "docs/glossary.md"
LEFT_ALONE = {
    "experiments/": "records, and specs that were committed before their seeds ran, stay as they were written",
    "models/": "a tokenizer's vocabulary",
    "tests/unit/test_glossary.py": "its own examples",
    GLOSSARY: "the list itself",
}
HONEST = {
    ("CHANGELOG.md", "optimiser"): "a label's old value, which the entry says is gone",
    ("CHANGELOG.md", "own group"): "an event's old name, likewise",
}
"""Refused words that a file needs, and for what."""
NO_PROSE = (".gz", ".lock", ".png", ".safetensors")
ROW = re.compile(r"^\|[^|]*\|[^|]*\|([^|]*)\|$")


def refused_words() -> list[str]:
    rows = [ROW.match(line) for line in (ROOT / GLOSSARY).read_text().splitlines()]
    return [word for row in rows if row for word in re.findall(r'"([^"]+)"', row[1])]


def texts() -> dict[str, str]:
    """The repository's files by name, those that are not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [name for name in listed if not name.startswith(tuple(LEFT_ALONE)) and not name.endswith(NO_PROSE)]
    return {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}


@cache
def pattern(word: str) -> re.Pattern[str]:
    """Finds a word in `spelled` text, its plural and other forms too. A phrase may be broken over
    two lines, in a comment or a string.
    """
    between = r'(?:\s|["#*/])+'
    return re.compile(rf"(?<![\w'-]){between.join(map(re.escape, word.split()))}(?:s|es|ed|ing)?(?![\w-])")


def spelled(text: str) -> str:
    """In small letters, with the words in `snake_case` and `CamelCase` apart."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()


def occurrences(words: list[str], text: str) -> list[tuple[int, str]]:
    """Line numbers, each with the word that stands there."""
    lowered = text.lower()
    possible = [word for word in words if all(part in lowered for part in word.split())]
    if not possible:
        return []
    text = spelled(text)
    return [(text.count("\n", 0, found.start()) + 1, word) for word in possible for found in pattern(word).finditer(text)]


@pytest.fixture(scope="module")
def everything() -> dict[str, str]:
    return texts()


def test_the_glossary_refuses_something_and_there_is_something_to_look_at(everything: dict[str, str]) -> None:
    assert len(refused_words()) > 15
    assert len(everything) > 1000
    assert {"docs/results.md", "swarm_cli/dashboard/page/swarm.js", "Makefile"} < everything.keys()


def test_each_refused_word_is_found_also_in_capitals_and_over_two_lines() -> None:
    for word in refused_words():
        assert occurrences(refused_words(), f"x\n{word.upper()}.") == [(2, word)]
    assert [line for line, _ in occurrences(["own group"], 'x = 1\n# The own\n# groups of a node\n"own "\n"groups"')] == [2, 4]


@pytest.mark.parametrize(
    "text",
    ["useful groups", "model versions", "graders", "the grader's", "rejected messages", "firewalls", "blacklisted"]
    + ["def _own_groups(node):", "class OwnGroup:", "latestModelVersion = 1;", "OLD_LOGPROBS", "// the own\n// policy"],
)
def test_other_forms_and_names_are_found(text: str) -> None:
    assert len(occurrences(refused_words(), text)) == 1


@pytest.mark.parametrize("text", ["degraded", "down groups", "the contest setup", "their own policy"])
def test_parts_of_other_words_are_not(text: str) -> None:
    assert occurrences(refused_words(), text) == []


def test_no_word_that_the_glossary_refuses_is_written_anywhere(everything: dict[str, str]) -> None:
    """In a file's own name neither."""
    words = refused_words()
    found = [(name, line, word) for name, text in everything.items() for line, word in occurrences(words, f"{text}\n{name}")]
    honest = {(name, word) for name, _, word in found} & HONEST.keys()
    wrong = [f"{name}:{line}: {word!r}" for name, line, word in found if (name, word) not in honest]
    assert not wrong, f"{GLOSSARY} says not to write: {', '.join(wrong[:20])}"
    assert honest == HONEST.keys(), "an exception that nothing needs"

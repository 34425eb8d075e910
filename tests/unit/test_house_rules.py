"""The rules of CONTRIBUTING.md: a file is one idea, whole, and long code says why."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.unit.uncalled import uncalled

REPO = Path(__file__).parents[2]
PRODUCT = ("services", "shared", "swarm_cli", "lab", "monitoring", "benchmarks")
TOO_MANY_LINES = 701
EXPLAINED_LINES = 15
MOST_WIDTH = 132
TOLD_TO_TOOLS = re.compile(r"  # (type: ignore|noqa).*")
TOLD_WITHOUT_REASON = re.compile(r"  # (type: ignore|noqa)[^()#\n]*$", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef
CALLED_BY_OTHERS = {
    "shared/registry.py: look_again": "tests that install a package while they run",
    "shared/tasks/subprocess_reader.py: main": "the program text that subprocess_reader starts Python with",
    **dict.fromkeys(("shared/tasks/rubric.py: requests", "shared/tasks/rubric.py: reward"), "the sandbox, as a reward's file"),
    "describe": "prometheus_client asks collectors for it",
    **dict.fromkeys(("do_GET", "log_message"), "http.server calls it"),
    "shared/tasks/sandbox/forker.py: insert": "collections.abc.MutableSequence demands it",
    "_connect_to_server": "nats.aio.client.Client",
    **dict.fromkeys(("_make_self_pipe", "_close_self_pipe"), "asyncio's selector loop"),
    **dict.fromkeys(("get_code", "get_source"), "importlib.abc.InspectLoader"),
}
"""What no code of the product mentions, and who uses it. A name alone: wherever it is defined."""


@dataclass(frozen=True)
class Source:
    """A file of the product. `functions` and `classes`: all of them, nested ones too."""

    name: str
    text: str
    functions: list[Function]
    classes: list[ast.ClassDef]


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def read(name: str, text: str) -> Source:
    nodes = list(ast.walk(parsed(text)))
    functions = [node for node in nodes if isinstance(node, Function)]
    return Source(name, text, functions, [node for node in nodes if isinstance(node, ast.ClassDef)])


def texts(*patterns: str) -> dict[str, str]:
    """The repository's files by name, those that are not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: (REPO / name).read_text() for name in listed if (REPO / name).is_file()}


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return [read(name, text) for name, text in texts(*(f"{root}/*.py" for root in PRODUCT)).items()]


def long_files(files: dict[str, str]) -> dict[str, int]:
    return {name: count for name, text in files.items() if (count := len(text.splitlines())) >= TOO_MANY_LINES}


def length(node: Function | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def unexplained(source: Source) -> list[str]:
    """Private functions that are long and have neither docstring nor comment."""
    lines = TOLD_WITHOUT_REASON.sub("", source.text).splitlines()
    return [
        f"{source.name}: {node.name}"
        for node in source.functions
        if node.name.startswith("_")
        and not node.name.startswith("__")
        and length(node) >= EXPLAINED_LINES
        and ast.get_docstring(node) is None
        and not any(line.lstrip().startswith("#") or "  # " in line for line in lines[node.lineno - 1 : node.end_lineno])
    ]


def is_unsaid(text: str) -> bool:
    # Nearly all files begin with it, and parsing them all takes three seconds.
    return bool(text.strip()) and not text.startswith('"""') and ast.get_docstring(parsed(text)) is None


def undocumented(name: str, text: str) -> list[str]:
    """Public functions and classes without a docstring."""
    return [
        f"{name}: {node.name}"
        for node in parsed(text).body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and ast.get_docstring(node) is None
    ]


def too_wide(text: str) -> list[int]:
    """Numbers of the lines that are too long, not counting what tools are told at their ends."""
    return [number for number, line in enumerate(TOLD_TO_TOOLS.sub("", text).splitlines(), 1) if len(line) > MOST_WIDTH]


@pytest.mark.slow
def test_the_rules_see_what_breaks_them(sources: list[Source]) -> None:
    body = "".join(f"    a{number} = {number}\n" for number in range(EXPLAINED_LINES - 1))
    for text, found in (
        (f"def _long():\n{body}", ["it: _long"]),
        (f"def _long():  # type: ignore[x]\n{body}", ["it: _long"]),
        (f"def _long():\n    # so that\n{body}", []),
        (f'def _long():\n    """So that."""\n{body}', []),
        (f"def long():\n{body}", []),
    ):
        assert unexplained(read("it", text)) == found
    assert len(sources) > 250


def test_a_long_private_function_says_why(sources: list[Source]) -> None:
    found = [each for source in sources for each in unexplained(source)]
    assert not found, f"a docstring or a comment that says why: {', '.join(found)}"


def test_no_file_has_more_lines_than_one_idea_needs() -> None:
    assert long_files({"whole": "a\n" * (TOO_MANY_LINES - 1), "long": "a\n" * TOO_MANY_LINES}) == {"long": TOO_MANY_LINES}
    files = texts("*.py")
    assert {"tests/conftest.py", "tests/unit/test_house_rules.py"} < files.keys()
    found = long_files(files)
    assert not found, f"{TOO_MANY_LINES} lines or more: {found}"


def test_no_two_files_of_the_tests_have_one_name() -> None:
    """pytest imports a test file by its basename and refuses a second one; of two helpers of one
    name a reader opens the wrong one.
    """
    names = Counter(Path(name).name for name in texts("tests/*.py"))
    assert not [name for name, files in names.items() if files > 1 and name != "conftest.py"]


def test_no_test_uses_a_mocking_library() -> None:
    """What cannot be had is replaced by hand, so that the test shows what stands in for it."""
    asked = re.compile(r"^\s*(?:from|import) (?:unittest\.mock|unittest import mock|mock\b)", re.MULTILINE)
    assert asked.search("from unittest.mock import patch") and not asked.search("import mockery")
    assert [name for name, text in texts("*.py").items() if asked.search(text)] == []


def test_every_file_says_what_belongs_in_it() -> None:
    assert [name for name, text in {"said": '"""So."""', "not": "a = 1", "empty": ""}.items() if is_unsaid(text)] == ["not"]
    unsaid = [name for name, text in texts("*.py").items() if is_unsaid(text)]
    assert not unsaid, f"a docstring at the top that says what belongs in the file: {', '.join(unsaid)}"


def test_every_public_function_and_class_has_a_docstring() -> None:
    """But for tests, whose names are sentences. The examples too, which readers copy."""
    assert undocumented("it", 'def a(): pass\nclass B: pass\ndef _c(): pass\ndef d():\n    "So."\n') == ["it: a", "it: B"]
    files = {name: text for name, text in texts("*.py").items() if not re.search(r"(^|/)(tests/|test_)", name)}
    assert {"benchmarks/memory.py", "docs/examples/engine/swarm_example_engine.py"} < files.keys()
    found = [each for name, text in files.items() for each in undocumented(name, text)]
    assert not found, f"a docstring: {', '.join(found)}"


def test_no_line_is_wider_than_a_screen() -> None:
    """Ruff lets lines pass that are one long word or end in an address."""
    assert too_wide(f"{'a' * MOST_WIDTH}\n{'b' * MOST_WIDTH}c\n{'d' * MOST_WIDTH}  # type: ignore[misc]") == [2]
    found = [f"{name}:{line}" for name, text in texts("*.py").items() for line in too_wide(text)]
    assert not found, f"at most {MOST_WIDTH} characters: {', '.join(found)}"


def test_no_function_is_called_of_something(sources: list[Source]) -> None:
    """`for_node`, `node_config` or `pass_record` say what is given; `of_node` says what it is given
    from.
    """
    found = [
        f"{source.name}: {node.name}" for source in sources for node in source.functions if node.name.lstrip("_").startswith("of_")
    ]
    assert not found, found


def used_by_nobody(more: dict[str, str]) -> list[str]:
    product = texts(*(f"{root}/*.py" for root in PRODUCT if root != "benchmarks")) | more
    others = texts("benchmarks/*.py", "scripts/*.py")
    entry_points = repr(re.findall(r'"(.*?)"', (REPO / "pyproject.toml").read_text()))
    trees = [{name: parsed(text) for name, text in files.items()} for files in (product, others | {"": entry_points})]
    return uncalled(*trees, CALLED_BY_OTHERS)


def test_nothing_is_kept_that_only_tests_use() -> None:
    """What is written for tests belongs to them, in `tests/`; what is left over, nowhere."""
    added = {
        "services/sampler/one.py": "def lost():\n    return lost()\nclass Empty: ...\nKEPT, LOST = 1, 2\n_OWN: int = KEPT\n",
        "services/sampler/two.py": "from services.sampler.one import KEPT\nclass Used:\n    def forsaken(self): ...\nUsed()\n",
        "services/sampler/__init__.py": "from services.sampler.one import Empty, lost\n__all__ = ['Empty', 'lost']\n",
    }
    found = used_by_nobody(added)
    expected = {"one.py: lost", "one.py: Empty", "one.py: LOST", "one.py: _OWN", "two.py: forsaken"}
    left_over = set(found) - {f"services/sampler/{each}" for each in expected}
    assert not left_over, f"no code of the product uses {', '.join(sorted(left_over))}"
    assert len(found) == len(expected)

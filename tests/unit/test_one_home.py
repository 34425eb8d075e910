"""What several parts of the product must agree on is written in one place: a name or a limit, and
none of the copies that would be forgotten when it changes.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PRODUCT = ("services", "shared", "swarm_cli", "lab", "monitoring")
VALUES = {
    "metrics.jsonl": "shared/run_records.py",
    "eval.jsonl": "shared/run_records.py",
    262_144: "shared/contracts/limits.py",
}
"""Values that mean one thing wherever they are, and the file that may write them."""
NAMES = {
    "PASS_REWARD": "shared/tasks/evaluation.py",
    "DEFAULT_VERIFIER": "shared/registry.py",
    "HALF_TOLERANCE": "shared/model/full_precision.py",
    "LONGEST_PROBE": "shared/model/configuration.py",
    "FORGETTING": "services/sampler/composition.py",
    "MAX_TEXT_CHARS": "shared/contracts/limits.py",
}
"""Numbers that also mean other things, by the name of what is meant, and the file that may give it
a value, under this name or with an underscore.
"""

FEWEST_NODES = 28
"""Of the syntax tree, docstrings left out: two or three statements."""
NAME = re.compile(r"id='(\w+)'")


@cache
def modules() -> dict[str, ast.Module]:
    files = sorted(file for folder in PRODUCT for file in (REPO / folder).rglob("*.py"))
    return {str(file.relative_to(REPO)): ast.parse(file.read_text()) for file in files}


def assigned(module: ast.Module) -> Iterator[str]:
    """The names that a file gives values to at its top level."""
    for statement in module.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from (node.id.lstrip("_") for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name))


def form(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A function's body whatever its own names; empty if it is too short to be anybody's idea."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if sum(1 for statement in body for _ in ast.walk(statement)) < FEWEST_NODES:
        return ""
    own = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    own |= {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return NAME.sub(lambda name: "id=''" if name[1] in own else name[0], ";".join(map(ast.dump, body)))


def written_twice(sources: Mapping[str, ast.Module]) -> list[list[str]]:
    """Functions with the same body."""
    places = defaultdict(list)
    for file, module in sources.items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (found := form(node)):
                places[found].append(f"{file}: {node.name}")
    return [each for each in places.values() if len(each) > 1]


@pytest.mark.slow
def test_no_function_is_written_twice() -> None:
    one = "def one(a, b):\n    total = a.first + b.second\n    while total < len(a.items):\n        total += b.step(a.width)\n"
    other = (
        one.replace("one", "other")
        .replace("total", "sum_of_all")
        .replace(" a", " x")
        .replace("(a", "(x")
        .replace("def", "async def")
    )
    assert written_twice({"a.py": ast.parse(one), "b.py": ast.parse(other)}) == [["a.py: one", "b.py: other"]]
    assert not written_twice({"a.py": ast.parse(one), "b.py": ast.parse(other.replace("step", "stride"))})
    assert not written_twice(modules())


@pytest.mark.slow
def test_a_value_that_several_parts_share_is_written_in_one_file() -> None:
    found = defaultdict(set)
    for name, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | int) and node.value in VALUES:
                found[node.value].add(name)
    assert found == {value: {home} for value, home in VALUES.items()}


@pytest.mark.slow
def test_a_number_that_several_parts_share_gets_its_value_in_one_file() -> None:
    found = defaultdict(set)
    for name, module in modules().items():
        for each in set(assigned(module)) & set(NAMES):
            found[each].add(name)
    assert found == {name: {home} for name, home in NAMES.items()}

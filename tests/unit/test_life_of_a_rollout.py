"""`docs/life-of-a-rollout.md` names only what there is: files, what they define, settings, metrics
and words of logs.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from shared.config import NodeConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "life-of-a-rollout.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| [`")]


@cache
def code() -> str:
    """All that services and what they share say, and the metrics as they are exported."""
    files = [file for folder in ("services", "shared") for file in sorted((ROOT / folder).rglob("*.py"))]
    return "\n".join([*(file.read_text(encoding="utf-8") for file in files), (ROOT / "docs" / "metrics.md").read_text("utf-8")])


def definitions(file: Path) -> set[str]:
    """Classes, functions and constants of a module, and methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            methods = (each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {node.name, *(f"{node.name}.{method}" for method in methods)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_page_goes_from_the_draw_to_the_gradient_and_back() -> None:
    files = [re.findall(r"`(services|shared)/([a-z]+)", row[0])[0] for row in ROWS]
    services = list(dict.fromkeys(second for first, second in files if first == "services"))
    assert services == ["generator", "verifier", "sampler", "trainer"]
    assert "ledger.py" in ROWS[0][0] and "policy_follower.py" in ROWS[-1][0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.findall(r"[\w/]+\.py", row[0])[0])
def test_each_row_names_a_file_what_it_defines_and_words_that_the_code_knows(row: list[str]) -> None:
    where, decides, wrong = row
    (shown, linked), names = re.findall(r"\[`([\w/.]+)`\]\(\.\./([\w/.]+)\)", where)[0], re.findall(r" `([\w.]+)`", where)
    assert shown == linked and (ROOT / shown).is_file()
    assert names and set(names) <= definitions(ROOT / shown)
    for word in re.findall(r"`([a-z_]+)`", decides + wrong):
        assert re.search(rf"\b{word}\b", code()), f"nothing is called {word}"
    for section, setting in re.findall(r"`([a-z_]+)\.([a-z_]+)`", decides + wrong):
        assert setting in NodeConfig.model_fields[section].annotation.model_fields, f"no setting {section}.{setting}"

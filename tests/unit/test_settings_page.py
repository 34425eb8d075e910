"""`docs/settings.md`: current, complete, and its environment variables are those that `load_config`
reads.
"""

from __future__ import annotations

import re
import tomllib

import pytest

from shared.config import NodeConfig, load_config
from shared.config.load import SECTIONS
from shared.config.trainer_section import RAW, TrainerConstants
from swarm_cli.settings_doc import COMMAND, PAGE, render

TASKS = '[{"dataset": "gcd"}]'


def test_the_page_of_settings_is_what_the_code_reads() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), f"docs/settings.md is stale: run `{COMMAND}`"


def test_every_section_has_a_heading_and_every_setting_a_row_with_a_meaning() -> None:
    page = render()
    headings = re.findall(r"^## (.+)$", page, flags=re.MULTILINE)
    inside = {"tasks": ["tasks.judge"], "eval": ["eval.sets"], "trainer": ["trainer.constants", "trainer.lora"]}
    assert headings == [heading for section in SECTIONS for heading in [section, *inside.get(section, [])]]
    assert set(SECTIONS) == set(NodeConfig.model_fields)
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert all(cell.strip() for row in rows for cell in row), "a cell is empty"


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("SWARM_TRAINER__LORA__RANK", "8", lambda config: config.trainer.lora.rank == 8),
        ("SWARM_EVAL__SETS", '[{"name": "a", "dataset": "lcm"}]', lambda config: config.eval.sets[0].dataset == "lcm"),
        ("SWARM_TRAINER__CONSTANTS__BETAS", "[0.8, 0.9]", lambda config: config.trainer.constants.betas == (0.8, 0.9)),
    ],
)
def test_a_variable_named_after_a_setting_as_the_page_says_sets_it(monkeypatch, variable, value, read) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SWARM_TASKS", TASKS)
    monkeypatch.setenv(variable, value)
    assert read(load_config())


def test_the_page_on_training_lists_every_constant_with_its_default_and_marks_what_raw_changes() -> None:
    page = (PAGE.parent / "training.md").read_text(encoding="utf-8")
    table = page[page.index("## Constants") :]
    listed: dict[str, str] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            names, defaults = (cell.strip() for cell in line.strip("|").split(" | ")[:2])
            found = re.findall(r"`(\w+)`(\*?)", names)
            values = [defaults] if len(found) == 1 else re.split(r", (?![^\[]*\])", defaults)
            listed |= dict(zip([name + star for name, star in found], values, strict=True))
    constants = TrainerConstants()
    assert {name.rstrip("*") for name in listed} == set(TrainerConstants.model_fields)
    assert {name.rstrip("*") for name in listed if name.endswith("*")} == set(RAW)
    for name, shown in listed.items():
        value = getattr(constants, name.rstrip("*"))
        assert (
            None
            if shown == "unset"
            else tomllib.loads(f"x = {shown.strip('`') if '`' not in shown else repr(shown.strip('`'))}")["x"]
        ) == (list(value) if isinstance(value, tuple) else value), name


def unknown_settings(text: str) -> list[str]:
    """Return names such as `trainer.lora.rank` that the sections of a configuration do not have."""
    found = []
    for name in re.findall(rf"`((?:{'|'.join(NodeConfig.model_fields)})(?:\.[a-z_]+)+)(?:`| = )", text):
        section, *path = name.split(".")
        value = NodeConfig.model_fields[section].get_default(call_default_factory=True)
        for field in path:
            known = getattr(type(value), "model_fields", {})
            if field not in known:
                found.append(name)
                break
            value = getattr(value, field)
    return found


def test_every_setting_that_a_page_names_exists() -> None:
    files_and_methods = {"node.toml", "node.nk", "node.json", "eval.jsonl", "model.gguf", "model.generate"}
    root = PAGE.parents[1]
    pages = [root / "README.md", root / "experiments" / "README.md", *(root / "docs").rglob("*.md")]
    gone = {page.name: set(unknown_settings(page.read_text(encoding="utf-8"))) - files_and_methods for page in pages}
    assert {page: names for page, names in gone.items() if names} == {}
    assert unknown_settings("`policy_store.keep`, `trainer.lora.rank`, `sampler.adapt = 1`") == ["policy_store.keep"]

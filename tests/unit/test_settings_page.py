"""`docs/settings.md`: current, complete, and its environment variables are those that `load_config`
reads.
"""

from __future__ import annotations

import re

import pytest

from shared.config import NodeConfig, load_config
from swarm_cli.settings_doc import COMMAND, PAGE, render

TASKS = '[{"dataset": "gcd"}]'


def test_the_page_of_settings_is_what_the_code_reads() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), f"docs/settings.md is stale: run `{COMMAND}`"


def test_every_section_has_a_heading_and_every_setting_a_row_with_a_meaning() -> None:
    page = render()
    headings = re.findall(r"^## (.+)$", page, flags=re.MULTILINE)
    assert headings == [*list(NodeConfig.model_fields)[:9], "trainer.lora", *list(NodeConfig.model_fields)[9:]]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert all(cell.strip() for row in rows for cell in row), "a cell is empty"


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("SWARM_TRAINER__LORA__RANK", "8", lambda config: config.trainer.lora.rank == 8),
        ("SWARM_POLICY_STORE__KEEP", "5", lambda config: config.policy_store.keep == 5),
        ("SWARM_SAMPLER__ADAPT_INFORMATIVE", "[0.1, 0.2]", lambda config: config.sampler.adapt_informative == (0.1, 0.2)),
    ],
)
def test_a_variable_of_the_page_sets_what_it_stands_beside(monkeypatch, variable, value, read) -> None:  # type: ignore[no-untyped-def]
    assert f"`{variable}`" in render()
    monkeypatch.setenv("SWARM_TASKS", TASKS)
    monkeypatch.setenv(variable, value)
    assert read(load_config())

"""A command imports what it needs: told by modules, not by a clock. What a pipe gets is whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.version import VERSION
from swarm_cli.app import COMMANDS, GROUPS
from swarm_cli.console import terminal

HEAVY = {
    *("torch", "transformers", "safetensors", "peft", "reasoning_gym", "sympy", "matplotlib", "pandas"),
    *("nats", "aiohttp", "numpy", "prometheus_client", "httpx2", "honcho"),
}
NEEDED_AT_ONCE = {"nats": {"nats", "aiohttp", "numpy", "prometheus_client"}, "dashboard": {"prometheus_client"}}
IMPORTED = """
import sys
from swarm_cli.app import build
known = dict.fromkeys(sys.argv[2].split(","))
build(sys.argv[1])
print(",".join(name for name in known if name in sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, *GROUPS])
def test_a_command_starts_without_what_it_may_need_later(command: str) -> None:
    asked = [sys.executable, "-c", IMPORTED, command, ",".join(sorted(HEAVY))]
    imported = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=180).stdout.strip()
    assert set(filter(None, imported.split(","))) <= NEEDED_AT_ONCE.get(command, set())


@pytest.mark.slow
def test_the_version_is_printed() -> None:
    asked = [sys.executable, "-m", "swarm_cli", "--version"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True, timeout=180).stdout == f"swarm {VERSION}\n"


def test_a_table_in_a_pipe_is_not_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table

    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("first", "second")
    table.add_row("a" * 150, "b" * 150)
    terminal().print(table)
    assert "a" * 150 in capsys.readouterr().out
    terminal(fit=True).print(table)
    assert "a" * 150 not in capsys.readouterr().out

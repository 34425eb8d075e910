"""A command imports what it needs: told by modules, not by a clock. What a pipe gets is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.version import VERSION
from swarm_cli.app import COMMANDS, GROUPS
from swarm_cli.console import terminal
from swarm_cli.installation import DEMO_CONFIG

NAMES = [name for names in (*COMMANDS.values(), *GROUPS.values()) for name in names]
HEAVY = {
    *("torch", "transformers", "safetensors", "peft", "reasoning_gym", "sympy", "matplotlib", "pandas"),
    *("nats", "aiohttp", "numpy", "prometheus_client", "httpx2", "honcho"),
}
NEEDED_AT_ONCE = {"nats": {"nats", "aiohttp", "numpy", "prometheus_client"}, "dashboard": {"prometheus_client"}}
IMPORTED = """
import os, sys
import rich.table, shared.config, shared.runtime.logs, swarm_cli.console  # of most commands, and looked at with each
from swarm_cli.app import build
for command in sys.argv[2:]:
    process = os.fork()
    if process == 0:
        build(command)
        print(command, *(name for name in sys.argv[1].split(",") if name in sys.modules), flush=True)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0, command
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Return what is in memory when a command begins, each in a process that has built no other
    one.
    """
    asked = [sys.executable, "-c", IMPORTED, ",".join(sorted(HEAVY)), *NAMES, "--version"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=600).stdout.splitlines()
    return {command: set(names) for command, *names in map(str.split, told)}


@pytest.mark.slow
@pytest.mark.parametrize("command", [*NAMES, "--version"])
def test_a_command_starts_without_what_it_may_need_later(command: str, imported: dict[str, set[str]]) -> None:
    assert imported[command] <= NEEDED_AT_ONCE.get(command, set())


CHECKED = """
import sys
from swarm_cli.app import main
try:
    main()
finally:
    print(",".join(name for name in KNOWN if name in sys.modules), file=sys.stderr)
"""
ASKED = {"tasks": [{"dataset": "gcd"}], "held_out": 0, "places": [], "sets": [], "scoring": {}}


@pytest.mark.slow
def test_checking_a_configuration_imports_no_more_than_its_command() -> None:
    asked = [sys.executable, "-c", CHECKED.replace("KNOWN", str(HEAVY)), "config", "check", "--config", str(DEMO_CONFIG)]
    answer = subprocess.run(
        asked, capture_output=True, text=True, timeout=180, check=False, env=os.environ | {"PYTHONHASHSEED": "0"}
    )
    assert answer.stderr.splitlines()[-1:] in ([], [""]), answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "asked"),
    [("swarm_cli.task_probe", ASKED), ("swarm_cli.model.facts", {"path": str(Path(__file__).parent)})],
)
def test_a_process_of_a_check_imports_no_part_of_a_command(module: str, asked: dict[str, object]) -> None:
    unneeded = ("structlog", "typer", "nats", "shared.config.load", "shared.tasks.sandbox.pool")
    started = f"import sys; from {module} import main; main(); print([name for name in {unneeded} if name in sys.modules])"
    known = [sys.executable, "-c", started.replace("print(", "print(file=sys.stderr, *")]
    answer = subprocess.run(known, input=json.dumps(asked), capture_output=True, text=True, timeout=180, check=True)
    assert answer.stderr.splitlines()[-1].strip() == "", answer.stderr


ANSWERED = """
import sys
from swarm_cli.app import main
try:
    main()
finally:
    print(",".join(name for name in ("torch", "transformers", "peft") if name in sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (["nosuch"], "there is no folder nosuch: check the spelling, or give a hub name (OWNER/NAME) with --revision"),
        pytest.param(
            ["someone/model"],
            "there is no folder someone/model, and a hub name needs --revision: give the full hash",
            marks=pytest.mark.long,
        ),
        (["someone/model", "--revision", "main"], "--revision 'main' is not the full hash of a commit: give the full hash"),
        pytest.param([__file__], "is a file: give a model's folder", marks=pytest.mark.long),
        (["."], ". holds no config.json"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_slow_is_imported(model: list[str], said: str) -> None:
    asked = [sys.executable, "-c", ANSWERED, "model", "memory", *model]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parent)
    assert (answer.returncode, answer.stdout) == (1, "\n") and said in answer.stderr, answer.stderr


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

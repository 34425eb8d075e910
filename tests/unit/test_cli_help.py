"""What `--help` shows is what was written: placeholders are not taken for markup and swallowed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from rich.table import Table
from typer.main import get_command
from typer.testing import CliRunner

from swarm_cli.app import app
from swarm_cli.console import show_table


def commands(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


ALL = dict(commands(get_command(app)))


def shown(path: tuple[str, ...]) -> str:
    """The help without frames, spaces and markup, so that where its lines break does not matter."""
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "4000", "TERMINAL_WIDTH": "4000"})
    assert result.exit_code == 0
    return bare(result.output)


def bare(text: str) -> str:
    return re.sub(r"[\s│╭╮╰╯─`]", "", text)


@pytest.mark.slow
@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_shows_every_word_of_every_command_and_option(path: tuple[str, ...]) -> None:
    command, text = ALL[path], shown(path)
    told = [getattr(command, "help", None), *(getattr(option, "help", None) for option in getattr(command, "params", []))]
    for words in filter(None, told):
        assert bare(words) in text, words


def test_usage_lines_call_arguments_as_the_pages_do_in_capitals() -> None:
    arguments = {
        (*path, each.name): str(each.metavar)
        for path, command in ALL.items()
        for each in getattr(command, "params", [])
        if each.param_type_name == "argument"
    }
    assert arguments["rollouts", "node"] == "NODE" and arguments["restart", "service"] == "SERVICE"
    assert {name: shown for name, shown in arguments.items() if shown != shown.upper() or shown == "NONE"} == {}


def test_a_table_in_a_pipe_has_no_line_longer_than_its_own_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("dataset", "answer", title="answers", show_lines=True)
    table.add_row("gcd", "x" * 5_000)
    table.add_row("products", "short")
    show_table(table)
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert [len(line) for line in lines if "short" in line] == [len("products  short")]
    assert any("x" * 5_000 in line for line in lines), "nothing is cut"

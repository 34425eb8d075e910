"""Commands that pages tell a reader to type exist, with the options that they are shown with."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from swarm_cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/*.md", "docs/extend/*.md", "docs/runbooks/*.md", "experiments/README.md"]
FOREIGN = {"--help"}


def shown(text: str) -> list[str]:
    """Lines of code that begin with `swarm`, and such words within backticks."""
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    lines = [*re.findall(r"^(swarm [a-z].*)$", fenced, flags=re.M), *re.findall(r"^ {4}(swarm [a-z].*)$", text, flags=re.M)]
    said = [*lines, *re.findall(r"`(swarm [a-z][^`\n]*)`", text)]
    commands = [each.strip() for line in said for each in line.split(" # ")[0].split(" && ")]
    return [each for each in commands if not each.startswith("swarm plane:")]  # what a command prints


@cache
def program() -> Any:
    return get_command(app)


def unknown(line: str) -> list[str]:
    """Return what of a command line does not exist."""
    command = program()
    words = shlex.split(re.split(r" [<>|]+ ", line)[0].replace("[", " ").replace("]", " "))[1:]
    while words and hasattr(command, "commands") and words[0] not in FOREIGN:
        if words[0] not in command.commands:
            return [words[0]]
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | FOREIGN
    return [word for word in words if word.startswith("--") and word.split("=")[0] not in options]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_on_a_page_exists_with_its_options(page: str) -> None:
    lines = [line for file in ROOT.glob(page) for line in shown(file.read_text())]
    assert len(lines) >= 5
    assert {line: missing for line in lines if (missing := unknown(line))} == {}


def test_the_check_sees_a_command_and_an_option_that_do_not_exist() -> None:
    assert unknown("swarm jion TOKEN") == ["jion"]
    assert unknown("swarm join TOKEN --modle x") == ["--modle"]
    assert unknown("swarm nats config --plane swarm --nodes alpha") == []


def test_joining_is_two_lines_in_the_readme() -> None:
    section = (ROOT / "README.md").read_text().split("### Join a swarm")[1].split("## Commands")[0]
    lines = [line.split("#")[0].split() for line in section.splitlines() if line.startswith("    swarm")]
    assert [line[:2] for line in lines] == [["swarm", "invite"], ["swarm", "join"]]


def test_a_node_that_is_listed_is_shown_with_the_reload_that_lets_it_in() -> None:
    section = (ROOT / "docs" / "joining.md").read_text().split("## A secured hub")[1].split("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    after = [lines[place + 1].split("  ")[0] for place, line in enumerate(lines) if line.startswith("swarm nats config")]
    assert after == ["nats-server --signal reload=swarm.pid"] * 2 and section.count("twice, seconds apart") == 2

"""A later token adds nobody to the roster of a node that has joined, unless its operator agrees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.identity.keys import SigningKey, new_seed
from swarm_cli.errors import CommandError
from swarm_cli.invitation import Member
from swarm_cli.join.command import confirmed, without_roster
from swarm_cli.join.newcomer import JoinFolder
from tests.unit.test_invitation import KEY, invitation

ROOT = Path(__file__).parents[2]
ALPHA = Member(node="alpha", public_key=KEY)
MALLORY = Member(node="mallory", public_key=SigningKey(new_seed()).public_key)
OWN = SigningKey(new_seed()).public_key
ASK = """
import sys
from swarm_cli.invitation import Member
from swarm_cli.join.command import confirmed
print(confirmed([Member(node="mallory", public_key=sys.argv[1])], True))
"""


@pytest.fixture
def folder(tmp_path: Path) -> JoinFolder:
    return JoinFolder(tmp_path / "joined" / "demo")


def test_the_first_token_s_lines_are_not_asked_about(folder: JoinFolder) -> None:
    assert folder.lines_to_ask_about([ALPHA, MALLORY], OWN) == []
    folder.path.mkdir(parents=True)
    folder.signing_key()
    assert folder.lines_to_ask_about([ALPHA, MALLORY], OWN) == [], "it was only checked"


def test_a_later_token_s_new_lines_are_asked_about(folder: JoinFolder) -> None:
    folder.keep_roster([ALPHA])
    assert folder.lines_to_ask_about([ALPHA], OWN) == []
    assert folder.lines_to_ask_about([ALPHA, Member(node="me", public_key=OWN)], OWN) == []
    assert folder.lines_to_ask_about([ALPHA, MALLORY], OWN) == [MALLORY]
    folder.roster_file.write_text("# nobody\n")
    assert folder.lines_to_ask_about([ALPHA], OWN) == [ALPHA], "which the operator has removed"


def test_a_roster_for_a_node_that_has_joined_without_one_is_asked_about(folder: JoinFolder) -> None:
    folder.path.mkdir(parents=True)
    folder.config_file.touch()
    assert folder.lines_to_ask_about([MALLORY], OWN) == [MALLORY]
    with pytest.raises(CommandError, match="admit only these nodes"):
        confirmed([MALLORY], has_roster=False)


def test_where_nobody_can_be_asked_the_refusal_names_the_lines_and_both_options() -> None:
    with pytest.raises(CommandError, match=rf"(?s)mallory {MALLORY.public_key}.*--accept-roster.*--keep-roster"):
        confirmed([MALLORY], has_roster=True)
    assert without_roster(invitation(roster=[ALPHA])) == invitation()


@pytest.mark.slow
@pytest.mark.parametrize(("said", "taken"), [("y\n", "True"), ("n\n", "False"), ("\n", "False")])
def test_at_a_terminal_only_a_yes_adds_them(said: str, taken: str) -> None:
    controlling, terminal = os.openpty()
    os.write(controlling, said.encode())
    done = subprocess.run(
        [sys.executable, "-c", ASK, MALLORY.public_key],
        cwd=ROOT, stdin=terminal, stderr=terminal, stdout=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    shown = os.read(controlling, 65_536).decode()
    os.close(controlling)
    os.close(terminal)
    assert done.stdout.split()[-1:] == [taken]
    assert f"mallory {MALLORY.public_key}" in shown and "anybody with a token" in shown

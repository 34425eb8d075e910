"""A later token adds nobody to the roster of a node that has joined."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.identity.keys import SigningKey, new_seed
from swarm_cli.invitation import Member
from swarm_cli.join.newcomer import JoinFolder
from tests.unit.test_invitation import KEY

ALPHA = Member(node="alpha", public_key=KEY)
MALLORY = Member(node="mallory", public_key=SigningKey(new_seed()).public_key)
OWN = SigningKey(new_seed()).public_key


@pytest.fixture
def folder(tmp_path: Path) -> JoinFolder:
    return JoinFolder(tmp_path / "joined" / "demo")


def test_the_first_token_s_lines_are_taken(folder: JoinFolder) -> None:
    assert folder.lines_to_add_by_hand([ALPHA, MALLORY], OWN) == []
    folder.path.mkdir(parents=True)
    folder.signing_key()
    assert folder.lines_to_add_by_hand([ALPHA, MALLORY], OWN) == [], "it was only checked"


def test_a_later_token_s_new_lines_are_for_a_person(folder: JoinFolder) -> None:
    folder.keep_roster([ALPHA])
    assert folder.lines_to_add_by_hand([ALPHA], OWN) == []
    assert folder.lines_to_add_by_hand([ALPHA, Member(node="me", public_key=OWN)], OWN) == []
    assert folder.lines_to_add_by_hand([ALPHA, MALLORY], OWN) == [MALLORY]
    folder.roster_file.write_text("# nobody\n")
    assert folder.lines_to_add_by_hand([ALPHA], OWN) == [ALPHA], "which the operator has removed"


def test_a_roster_for_a_node_that_has_joined_without_one_is_for_a_person(folder: JoinFolder) -> None:
    folder.path.mkdir(parents=True)
    folder.config_file.touch()
    assert folder.lines_to_add_by_hand([MALLORY], OWN) == [MALLORY]

"""Where a command takes its token from: the command line, standard input, or the environment."""

from __future__ import annotations

import os
import sys

from swarm_cli.errors import CommandError
from swarm_cli.invitation.token import MAX_CHARS, Invitation, TokenError, read_token

TOKEN_VARIABLE = "JOIN_TOKEN"
"""It has no SWARM_ prefix because it is not a setting."""


def given_text(argument: str | None) -> str:
    """The token's text: from standard input if `argument` is `-`, from the environment if it is
    empty. The variable is removed, so that processes started from here do not inherit it.

    Raises:
        CommandError: no token was given.
    """
    in_environment = os.environ.pop(TOKEN_VARIABLE, "")
    text = sys.stdin.read(MAX_CHARS + 1) if argument == "-" else argument or in_environment
    if not text.strip():
        raise CommandError(
            f"no token was given: put it after the command, pipe it in with `-`, or set {TOKEN_VARIABLE}, which other users of "
            "this machine cannot see"
        )
    return text.strip()


def given_invitation(text: str) -> Invitation:
    """The token's contents. Raises CommandError if it cannot be used."""
    try:
        return read_token(text)
    except TokenError as error:
        raise CommandError(str(error)) from None

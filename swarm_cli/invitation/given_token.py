"""Where a command takes its token from: the command line, standard input, or the environment."""

from __future__ import annotations

import os
import sys

from swarm_cli.errors import CommandError
from swarm_cli.invitation.token import MAX_CHARS, Invitation, TokenError, read_token

TOKEN_VARIABLE = "JOIN_TOKEN"
"""Not one of the settings, whose names begin with SWARM_."""


def given_text(argument: str | None) -> str:
    """The word that was given; `-` means standard input, nothing the environment. From there it is
    taken away, so that no process that is started from here holds it.

    Raises:
        CommandError: there is none.
    """
    in_environment = os.environ.pop(TOKEN_VARIABLE, "")
    text = sys.stdin.read(MAX_CHARS + 1) if argument == "-" else argument or in_environment
    if not text.strip():
        raise CommandError(
            f"no token was given: put it behind the command, pipe it in with `-`, or set {TOKEN_VARIABLE}, which other users of "
            "this machine do not see"
        )
    return text.strip()


def given_invitation(text: str) -> Invitation:
    """What the token says. Raises CommandError."""
    try:
        return read_token(text)
    except TokenError as error:
        raise CommandError(str(error)) from None

"""Asks before a later token makes this node admit more nodes: whoever has a token of a swarm can
make another with lines of their own. The first token of a folder is taken as it is, because there
is nothing to compare it with.
"""

from __future__ import annotations

import sys

import msgspec
import typer

from swarm_cli.errors import CommandError
from swarm_cli.invitation.token import Invitation, Member


def without_roster(invitation: Invitation) -> Invitation:
    """The same token without lines of a roster."""
    return msgspec.structs.replace(invitation, roster=[])


def confirmed(added: list[Member], has_roster: bool) -> bool:
    """Whether the person at the terminal wants these lines of a token added to the node's roster.

    Raises:
        CommandError: there is no terminal to ask at.
    """
    lines = "\n".join(f"  {member.node} {member.public_key}" for member in added)
    effect = "admit these nodes as well" if has_roster else "admit only these nodes and no longer any"
    told = (
        f"this node has joined before, and the token would make it {effect}; anybody with a token can have put them there:\n{lines}"
    )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CommandError(
            f"{told}\nif you know them (from the operator, through another channel than the token): --accept-roster; to join with "
            "the roster as it is: --keep-roster"
        )
    typer.echo(told, err=True)
    return typer.confirm("Admit them? (n: join with the roster as it is)", default=False, err=True)

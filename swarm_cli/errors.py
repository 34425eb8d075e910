"""How a command says that it cannot do what was asked."""

from __future__ import annotations

from shared.contracts.wire import is_node_name


class CommandError(Exception):
    """The command cannot go on. The message names the cause and the remedy; `exit_code` is the
    process's.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def checked_node(name: str) -> str:
    """`name` itself. Raises CommandError when no node can have that name."""
    if not is_node_name(name):
        raise CommandError(f"{name[:80]!r} is no name of a node: up to 32 lower-case letters, digits and hyphens")
    return name

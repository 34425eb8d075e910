"""The error that ends a command."""

from __future__ import annotations

from shared.contracts.wire import is_node_name


class CommandError(Exception):
    """The command cannot continue. The message names the cause and the remedy; the process exits
    with `exit_code`.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def checked_node(name: str) -> str:
    """Return `name`. Raises CommandError if it is not a valid node name."""
    if not is_node_name(name):
        raise CommandError(f"{name[:80]!r} is not a node name: use up to 32 lower-case letters, digits and hyphens")
    return name

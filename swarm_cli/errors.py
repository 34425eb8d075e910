"""How a command says that it cannot do what was asked."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot go on. The message names the cause and the remedy; `exit_code` is the process's."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

"""Output of commands: results go to standard output, everything else to standard error, and all of
it is escaped.

Names, states, causes and answers come from other nodes and from models. They are shown as plain
text: neither rich's markup nor control characters take effect (`shared.text`).
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from types import TracebackType

import typer
from rich.console import Console
from rich.text import Text

from shared.runtime.logs import configure_logging
from shared.text import visible, visible_lines

CELL_CHARACTERS = 64
"""Longest text of a table's cell. Valid names are shorter; an invalid one must not push the other
cells aside.
"""
_UNCUT_COLUMNS = 10_000


def log_to_standard_error() -> None:
    """Send log lines to standard error, so that they do not mix with the result, and only errors:
    the command itself reports what went wrong.
    """
    configure_logging(level="error", log_format="console", stream=sys.stderr)
    sys.excepthook = _tell


def note(text: str) -> None:
    """Print a line for the person at the terminal. A terminal that was closed does not make the
    command fail.
    """
    with suppress(OSError):
        print(visible_lines(text), file=sys.stderr, flush=True)


def say(text: str = "") -> None:
    """Print one or more lines of the result."""
    typer.echo(visible_lines(text))


def count(number: int, noun: str) -> str:
    """Such as `1 node`, `2 nodes` and `4 processes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def indented(text: str) -> str:
    """`text` with all lines but the first indented, so that a line of an answer cannot look like
    the beginning of the next answer.
    """
    return text.replace("\n", "\n  ")


def terminal(*, fit: bool = False) -> Console:
    """Standard output for tables. Strings are plain text: `x[/bold]` and `:smile:` are printed as
    they are.

    A table that goes to a pipe or a file is as wide as its text, because its reader cannot widen a
    window to see what was cut. With `fit`, or if COLUMNS is set, it has the terminal's width.
    """
    whole = not fit and not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Console(markup=False, emoji=False, width=_UNCUT_COLUMNS if whole else None)


def cell(text: str, limit: int = CELL_CHARACTERS) -> Text:
    """A table's cell with text of unknown origin."""
    return Text(visible(text, limit))


def _tell(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    note("".join(traceback.format_exception(kind, error, where)).rstrip())

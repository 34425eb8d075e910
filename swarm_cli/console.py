"""Output of commands: results go to standard output, everything else to standard error, and all of
it is escaped.

Names, states, causes and answers come from other nodes and from models. They are shown as plain
text: neither rich's markup nor control characters take effect (`shared.text`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.text import visible, visible_lines

CELL_CHARACTERS = 64
"""Longest text of a table's cell. Valid names are shorter; an invalid one must not push the other
cells aside.
"""
_UNCUT_COLUMNS = 10_000
SLOW_S = 2.0
"""After so long a person wants to know what a command is doing."""


def note(text: str) -> None:
    """Print a line for the person at the terminal. A terminal that was closed does not make the
    command fail.
    """
    with suppress(OSError):
        print(visible_lines(text), file=sys.stderr, flush=True)


@contextmanager
def told_if_slow(doing: str) -> Iterator[None]:
    """Print a line once the work in the block has taken `SLOW_S`."""
    late = threading.Timer(SLOW_S, note, [f"{doing} ..."])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


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


def question_line(text: str) -> str:
    """A question under its label, unless it begins with that label itself."""
    return indented(text) if text.lstrip().lower().startswith("question:") else f"question:  {indented(text)}"


def terminal(*, fit: bool = False) -> Console:
    """Standard output for tables. Strings are plain text: `x[/bold]` and `:smile:` are printed as
    they are.

    Text that goes to a pipe or a file is never cut, because its reader cannot widen a window. With
    `fit`, or if COLUMNS is set, the console has the terminal's width.
    """
    return Console(markup=False, emoji=False, width=_UNCUT_COLUMNS if is_piped() and not fit else None)


def is_piped() -> bool:
    """Return whether the result goes to a pipe or a file whose reader did not set a width
    (COLUMNS).
    """
    return not sys.stdout.isatty() and not os.environ.get("COLUMNS")


def show_table(table: Table, console: Console | None = None) -> None:
    """Print a table. In a pipe it has no frame, and no line is longer than its own text: a frame
    would make every line as long as the longest cell.
    """
    if not is_piped():
        (console or terminal()).print(table)
        return
    table.box, table.pad_edge, table.show_lines, table.leading = None, False, False, int(table.show_lines)
    plain = terminal()
    with plain.capture() as printed:
        plain.print(table)
    say("\n".join(line.rstrip() for line in printed.get().splitlines()))


def cell(text: str, limit: int = CELL_CHARACTERS) -> Text:
    """A table's cell with text of unknown origin."""
    return Text(visible(text, limit))

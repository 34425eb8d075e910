"""Finds the line of a TOML file that sets something. Pure; the file need not be valid."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_PART = r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'"""
_DOTTED = rf"(?:{_PART})(?:\s*\.\s*(?:{_PART}))*"
_TABLE = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")
_QUOTES = re.compile(r'"""|\'\'\'')


def line_of(text: str, path: Sequence[str | int]) -> int:
    """The number of the line that sets `path`, or else of the table or key that should hold it; 0
    if there is neither.

    Example: `("tasks", 1, "dataset")` is the line of `dataset` below the second `[[tasks]]`.
    """
    wanted = tuple(str(part) for part in path)
    best, found = 0, 0
    for number, there in _settings(text):
        if len(there) > best and wanted[: len(there)] == there:
            best, found = len(there), number
    return found


def _settings(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each table and key with the number of its line, from 1. An array's tables are counted."""
    table: tuple[str, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        begun_inside, inside = inside, inside ^ bool(len(_QUOTES.findall(line)) % 2)
        if begun_inside:
            continue
        if named := _TABLE.match(line):
            table = _parts(named[2])
            if named[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
            for length in range(len(table), 0, -1):
                if table[:length] in counts:
                    table = (*table[:length], str(counts[table[:length]]), *table[length:])
                    break
            yield number, table
        elif named := _KEY.match(line):
            yield number, (*table, *_parts(named[1]))


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_PART, dotted))

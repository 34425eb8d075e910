"""Collects what is wrong with the rows of a file, so that a user learns of all of it at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from shared.suggestion import did_you_mean
from shared.tasks.file_formats import Row
from shared.text import visible

MOST_TOLD = 10
"""Mistakes told in words; the others are counted."""
MOST_FOUND = 1000
"""Mistakes after which a file is not read further: it is another file than was meant."""
_NAME_TOLD_CHARS = 40
_NAMES_TOLD_CHARS = 200
_COLUMNS_KEPT = 200

Line = TypeVar("Line")


class _Mistake(NamedTuple):
    """`column`: the one that the row lacks, if that is the mistake; `names`: some that it has."""

    row: Row
    problem: str
    column: str = ""
    names: tuple[str, ...] = ()


class Mistakes:
    """The mistakes of one task source, which may be a folder of files."""

    def __init__(self, columns: Sequence[tuple[str, str]]) -> None:
        """`columns`: pairs of a setting (`question`) and the column that it names."""
        self._settings = {column: setting for setting, column in columns}
        self._found: list[_Mistake] = []
        self._present: set[tuple[Path, str]] = set()
        self._names: dict[Path, dict[str, None]] = {}

    def __len__(self) -> int:
        """Number of mistakes so far."""
        return len(self._found)

    @property
    def full(self) -> bool:
        """Whether there are so many that reading on would help nobody."""
        return len(self._found) >= MOST_FOUND

    def add(self, row: Row, problem: str) -> None:
        """A row cannot be used."""
        self._found.append(_Mistake(Row({}, row.file, row.number), problem))

    def lacks(self, row: Row, column: str) -> None:
        """A row has no such column. Whether the row is wrong or the column's name depends on the
        other rows of its file.
        """
        names = tuple(islice(row.values, _COLUMNS_KEPT))
        known = self._names.setdefault(row.file, {})
        known.update(dict.fromkeys(names[: _COLUMNS_KEPT - len(known)]))
        self._found.append(_Mistake(Row({}, row.file, row.number), "", column, names))

    def has(self, row: Row, column: str) -> None:
        """A row has the column."""
        self._present.add((row.file, column))

    def lines(self) -> list[str]:
        """One line per mistake, in the order of the rows, and how many are left out."""
        found: list[str | _Mistake] = []
        for file, group in groupby(sorted(self._found, key=lambda each: each.row[1:3]), lambda each: each.row.file):
            found += self._in_one_file(file, list(group))
        return [each if isinstance(each, str) else _said(each, self._settings) for each in first_of(found, at_least=self.full)]

    def _in_one_file(self, file: Path, found: list[_Mistake]) -> list[str | _Mistake]:
        """A column that no row has is one mistake, and so is a file of another kind."""
        known = {column for there, column in self._present if there == file}
        if not known and file not in self._names and len(found) > MOST_TOLD:
            first = _said(found[0], self._settings).removeprefix(f"{file}: ")
            return [f"{file}: none of its first {len(found):,} lines is a row; {first}"]
        lacking = {each.column for each in found if each.column}
        absent = [column for column in self._settings if column in lacking - known]
        return [
            *(self._no_column(file, column) for column in absent),
            *(each for each in found if not each.column or each.column in known),
        ]

    def _no_column(self, file: Path, column: str) -> str:
        setting = self._settings[column]
        return (
            f"{file}: there is no column {column!r}; its columns are {_listed(column, self._names[file], self._settings)}; "
            f"set `{setting}` (`swarm task`: --columns) to the {setting}s' column"
        )


def first_of(lines: Sequence[Line], *, at_least: bool = False) -> list[Line | str]:
    """The first lines, and a last one that counts the others. `at_least`: there may be more."""
    left = len(lines) - MOST_TOLD
    if left <= 0:
        return list(lines)
    return [*lines[:MOST_TOLD], f"and {'at least ' if at_least else ''}{left:,} more"]


def _said(mistake: _Mistake, settings: Mapping[str, str]) -> str:
    if not mistake.column:
        return f"{mistake.row.place}: {mistake.problem}"
    has = _listed(mistake.column, mistake.names)
    return (
        f"{mistake.row.place}: this row has no {mistake.column!r}, only {has}: give it one, remove it, or "
        f"set `{settings[mistake.column]}` to another column"
    )


def _listed(column: str, names: Iterable[str], taken: Iterable[str] = ()) -> str:
    """A file's columns, and which of them may have been meant: none that another setting names."""
    hint = did_you_mean(column, sorted({*names}.difference(taken)))
    listed = ", ".join(visible(name, _NAME_TOLD_CHARS) for name in sorted(names))[:_NAMES_TOLD_CHARS] or "(none)"
    return listed + (f" ({visible(hint)})" if hint else "")

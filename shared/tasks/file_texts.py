"""Rows of a task source's files as texts, each checked to be one that a message and a scorer can
take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from shared.tasks.file_formats import Row, rows_of
from shared.tasks.file_values import ValueProblem, as_text

MAX_TEXT_CHARS = 262_144
"""Longest question and longest answer, as in a message (`Task`)."""
_NAMES_KEPT = 200
_NAME_KEPT_CHARS = 200


class TextRow(NamedTuple):
    """`row`: where it is, and what is wrong with the whole of it; its values are left out, but if
    it lacks a column, it has the names of those that it has. `problems`: by column, what is wrong
    with its value; empty for a text. `texts`: one for each column; empty if anything is wrong.
    """

    row: Row
    problems: Mapping[str, str]
    texts: tuple[str, ...]


def text_rows(files: Sequence[Path], columns: Sequence[str]) -> Iterator[TextRow]:
    """All rows in order, with the texts of `columns`.

    Raises:
        FileSourceError: the package that reads such files is not installed.
    """
    for row in rows_of(files, columns):
        yield _as_texts(row, columns)


def _as_texts(row: Row, columns: Sequence[str]) -> TextRow:
    """Looks at every column, so that a row's mistakes are reported together."""
    place = Row({}, row.file, row.number, row.problem)
    if row.problem:
        return TextRow(place, {}, ())
    problems: dict[str, str] = {}
    texts: list[str] = []
    for column in columns:
        if column in row.values:
            try:
                texts.append(_text(row.values[column]))
                problems[column] = ""
            except ValueProblem as problem:
                problems[column] = str(problem)
    if len(problems) < len(set(columns)):
        names = (name[:_NAME_KEPT_CHARS] for name in islice(row.values, _NAMES_KEPT))
        place = place._replace(values=dict.fromkeys(names))
    return TextRow(place, problems, tuple(texts) if len(texts) == len(columns) else ())


def _text(value: Any) -> str:
    """Text that both a message and a scorer can take. A lone surrogate passes as JSON and would
    fail only when the group is packed, hours later. Raises ValueProblem.
    """
    text = as_text(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueProblem("holds half a character (a lone surrogate): write it as UTF-8") from None
    if not text.strip():
        raise ValueProblem("is empty: give it a text or remove the row")
    if len(text) > MAX_TEXT_CHARS:
        raise ValueProblem(f"has {len(text):,} characters, but a message can hold at most {MAX_TEXT_CHARS:,}: shorten it")
    return text

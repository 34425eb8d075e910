"""Rows of a task source's files as texts, each checked to be one that a message and a scorer can
take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from shared.contracts.limits import MAX_TEXT_CHARS
from shared.tasks.answers import MAX_ANSWER_CHARS
from shared.tasks.file_formats import Row, rows_of
from shared.tasks.file_values import ValueProblem, as_text

_NAMES_KEPT = 200
_NAME_KEPT_CHARS = 200


class TextRow(NamedTuple):
    """`row`: where it is, and what is wrong with the whole of it; its values are left out, but if
    it lacks a column, it has the names of those that it has. `problems`: by column, what is wrong
    with its value; empty for a text. `texts`: question and answer; empty if anything is wrong.
    """

    row: Row
    problems: Mapping[str, str]
    texts: tuple[str, ...]


def text_rows(files: Sequence[Path], question: str, answer: str) -> Iterator[TextRow]:
    """All rows in order, with the texts of the columns `question` and `answer`.

    Raises:
        FileSourceError: the package that reads such files is not installed.
    """
    for row in rows_of(files, [question, answer]):
        yield _as_texts(row, question, answer)


def _as_texts(row: Row, question: str, answer: str) -> TextRow:
    """Looks at every column, so that a row's mistakes are reported together."""
    place = Row({}, row.file, row.number, row.problem)
    if row.problem:
        return TextRow(place, {}, ())
    problems: dict[str, str] = {}
    texts: list[str] = []
    for column, checked in ((question, _question), (answer, _answer)):
        if column in row.values:
            try:
                texts.append(checked(row.values[column]))
                problems[column] = ""
            except ValueProblem as problem:
                problems[column] = str(problem)
    if len(problems) < len({question, answer}):
        names = (name[:_NAME_KEPT_CHARS] for name in islice(row.values, _NAMES_KEPT))
        place = place._replace(values=dict.fromkeys(names))
    return TextRow(place, problems, tuple(texts) if len(texts) == 2 else ())


def _text(value: Any) -> str:
    """Text that is not empty and can be packed. A lone surrogate passes as JSON and would fail only
    when the group is packed, hours later. Raises ValueProblem.
    """
    text = as_text(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueProblem("holds half a character (a lone surrogate): write it as UTF-8") from None
    if not text.strip():
        raise ValueProblem("is empty: give it a text or remove the row")
    return text


def _question(value: Any) -> str:
    text = _text(value)
    if len(text) > MAX_TEXT_CHARS:
        raise ValueProblem(f"has {len(text):,} characters, but a message can hold at most {MAX_TEXT_CHARS:,}: shorten it")
    return text


def _answer(value: Any) -> str:
    """A reference answer that is not too long to be scored. Raises ValueProblem."""
    text = _text(value)
    if len(text) > MAX_ANSWER_CHARS:
        raise ValueProblem(f"has {len(text):,} characters, but an answer of more than {MAX_ANSWER_CHARS:,} earns 0: shorten it")
    return text

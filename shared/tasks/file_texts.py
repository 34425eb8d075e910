"""Questions and answers of a task source's files, each checked to be a text that a message and a
scorer can take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.suggestion import did_you_mean
from shared.tasks.file_formats import FileSourceError, Row, rows_of
from shared.tasks.file_values import ValueProblem, as_text

MAX_TEXT_CHARS = 262_144
"""Longest question and longest answer, as in a message (`Task`)."""


def checked_texts(files: Sequence[Path], question: str, answer: str) -> Iterator[tuple[str, str]]:
    """The texts of the columns `question` and `answer`, in the order of the rows.

    Raises:
        FileSourceError: a file or a row cannot be used; the message names it.
    """
    for row in rows_of(files, [question, answer]):
        for setting, column in (("question", question), ("answer", answer)):
            if column not in row.values:
                hint = did_you_mean(column, row.values)
                raise FileSourceError(
                    f"{row.place}: there is no column {column!r}; its columns are {', '.join(sorted(row.values))[:200] or '(none)'}"
                    f"{f' ({hint})' if hint else ''}; set `{setting}` (`swarm task`: --columns) to the {setting}s' column"
                )
        yield _text(row, question), _text(row, answer)


def _text(row: Row, column: str) -> str:
    """Text that both a message and a scorer can take. A lone surrogate passes as JSON and would
    fail only when the group is packed, hours later.
    """
    try:
        text = as_text(row.values[column])
        text.encode()
    except ValueProblem as problem:
        raise FileSourceError(f"{row.place}: {column!r} {problem}") from None
    except UnicodeEncodeError:
        raise FileSourceError(f"{row.place}: {column!r} holds half a character (a lone surrogate): write it as UTF-8") from None
    if not text.strip():
        raise FileSourceError(f"{row.place}: {column!r} is empty: give it a text or remove the row")
    if len(text) > MAX_TEXT_CHARS:
        raise FileSourceError(
            f"{row.place}: {column!r} has {len(text):,} characters, but a message can hold at most {MAX_TEXT_CHARS:,}: shorten it"
        )
    return text

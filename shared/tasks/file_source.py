"""Tasks from the user's own file: `[[tasks]]` with `source = "file"`.

The file is read once, at the start, into questions and answers as text. The dataset is named after
the rows: `file_` and the first 40 digits of a hash over all of them in order. So nodes with the
same rows have the same tasks, whatever the file's format, and a reference to rows that a node does
not have can never be mistaken for one to its own.
"""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from shared.reward_files import NAMES_TOLD, columns_used, may_get_messages
from shared.suggestions import did_you_mean
from shared.tasks.file_columns import USUAL, Columns, TextRow, text_rows
from shared.tasks.file_formats import APART, UNCLOSED, FileSourceError, Row, place_in
from shared.tasks.file_rows import FileRows, RowsWriter, register_rows
from shared.tasks.hub_files import source_files
from shared.tasks.subprocess_reader import read_rows_in_subprocess
from shared.text import error_text, listed, visible

if TYPE_CHECKING:
    from shared.config.task_sections import TaskSpec

MAX_ROWS = 5_000_000
MAX_BYTES = 2 * 2**30
"""Largest number of rows and of UTF-8 bytes: what a node can hold and look through when it
starts.
"""


class _Key(NamedTuple):
    files: tuple[tuple[str, int, int], ...]
    question: str
    answer: str
    used: frozenset[str] | None
    keeps_messages: bool


_read: dict[_Key, FileRows] = {}


def load_rows(spec: TaskSpec) -> FileRows:
    """The rows of a file source, which this process holds from now on. A file is read only once
    while it does not change.

    Raises:
        FileSourceError: with a line for each mistake, which names the file, and the line or row.
    """
    files = source_files(spec.path, spec.revision)
    try:
        stats = [(str(file.absolute()), file.stat()) for file in files]
    except OSError as error:
        raise FileSourceError(f"{spec.path}: cannot be read ({error_text(error)}): let this user read it") from None
    if other := next((name for name, state in stats if not stat.S_ISREG(state.st_mode)), ""):
        raise FileSourceError(f"{spec.path}: {other} is a pipe or a device, which may never end: give a file")
    states = tuple((name, state.st_mtime_ns, state.st_size) for name, state in stats)
    key = _Key(states, spec.question, spec.answer, columns_used(spec.verifier), may_get_messages(spec.verifier))
    if key not in _read:
        if sum(state.st_size for _, state in stats) > MAX_BYTES:
            raise FileSourceError(f"{spec.path}: {_too_large()}")
        _read[key] = _packed(spec, files)
    register_rows(_read[key])
    return _read[key]


Spec = TypeVar("Spec", bound="TaskSpec")


def with_row_name(spec: Spec) -> Spec:
    """The same source; a file's `dataset` is the name of its rows. Raises FileSourceError."""
    if spec.source != "file":
        return spec
    rows = load_rows(spec)
    if spec.dataset not in {"", rows.name}:
        what = f"{spec.path}: its rows are those of {rows.name}, not of {spec.dataset}"
        raise FileSourceError(f"{what}: use the file that was meant, or omit `dataset`", rows)
    return spec.model_copy(update={"dataset": rows.name})


def _packed(spec: TaskSpec, files: Sequence[Path]) -> FileRows:
    """Checked rows in an unnamed temporary file, which is deleted when no process has it open."""
    try:
        used, keeps_messages = columns_used(spec.verifier), may_get_messages(spec.verifier)
        columns = Columns(spec.question, spec.answer, used, keeps_messages=keeps_messages)
    except ValueError as error:
        raise FileSourceError(f"{spec.path}: {error}") from None
    mistakes = Mistakes(columns)
    rows: FileRows | None = None
    try:
        with tempfile.TemporaryFile() as file, closing(_text_rows(files, columns)) as read_rows:
            writer = RowsWriter(cast(Any, file))
            for read in read_rows:
                mistakes.note(read)
                if mistakes.full:
                    break
                if read.texts:
                    question, answer, further = read.texts
                    writer.add(question, answer, further, read.asked, read.row.file, read.row.number)
                if writer.text_bytes > MAX_BYTES or len(writer) > MAX_ROWS:
                    raise FileSourceError("\n".join([f"{spec.path}: {_too_large()}", *mistakes.lines()]))
            if not len(writer) and not mistakes:
                raise FileSourceError(f"{spec.path}: it has no rows: write at least one with a question and an answer")
            if len(writer):
                rows = writer.finish(spec.path)
                rows.note = columns.note()
                rows.names = sorted(columns.names)
                rows.used = sorted(name for name in columns.names if columns.used is None or name in columns.used)
                rows.columns = {
                    setting: columns.needed(setting)[0].rpartition(".")[2]
                    for setting, written in columns.configured.items()
                    if "{" not in written
                }
    except OSError as error:
        raise FileSourceError(
            f"{spec.path}: its rows cannot be kept in {tempfile.gettempdir()} ({error_text(error)}): make room there or set TMPDIR"
        ) from None
    unread = MAX_ROWS if mistakes.end_early else len(mistakes)
    if rows is not None:
        _find_contradictions(rows, mistakes)
    if mistakes or rows is None:
        raise FileSourceError("\n".join(mistakes.lines()), rows, unread)
    return rows


def _find_contradictions(rows: FileRows, mistakes: Mistakes) -> None:
    """Two different answers to one question are refused, because whichever is right, the other
    would be rewarded as well.
    """
    assert rows.places is not None
    for first, second in rows.contradictions():
        if mistakes.full:
            return
        (question, answer), (file, number) = rows.row(first), rows.places.of(first)
        there = Row({}, *rows.places.of(second))
        where = place_in(file, number).removeprefix(f"{there.file}: ")
        mistakes.add(
            there,
            f"the same question as in {where}, {_plain(question)[:80]!r}, and another answer, {rows.row(second)[1][:40]!r} and not "
            f"{answer[:40]!r}: keep one of them",
        )


def _plain(question: str) -> str:
    """A question in one line, also if it is of messages."""
    return question.replace("\0", " ").strip()


def _text_rows(files: Sequence[Path], columns: Columns) -> Generator[TextRow]:
    yield from (read_rows_in_subprocess if files[0].suffix in APART else text_rows)(files, columns)


def _too_large() -> str:
    return f"more than {MAX_ROWS:,} rows or {MAX_BYTES / 2**30:g} GiB: a node holds no more; split it, and give each node a part"


# Collects what is wrong with the rows of a file, so that a user learns of all of it at once.


MOST_TOLD = 10
"""Mistakes told in words; the others are counted."""
MOST_FOUND = 1000
"""Mistakes after which a file is not read further: it is another file than was meant."""
_NAME_TOLD_CHARS = 40
_LIKELY = {"question": ("instruction", "query", "input"), "answer": ("output", "response", "target")}
"""Columns that are proposed for a setting, and not taken unasked: what is in them differs."""


class Mistakes:
    """The mistakes of one task source, which may be a folder of files. A column that the first row
    of a file lacks is one mistake of the file.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._found: list[tuple[Row, str]] = []
        self._read: set[Path] = set()
        self._absent: set[tuple[Path, str]] = set()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def full(self) -> bool:
        """Check whether there are so many that reading on would help nobody."""
        return len(self._found) >= MOST_FOUND

    @property
    def end_early(self) -> bool:
        """Check whether a quote that is not closed hides the rows after it."""
        return any(UNCLOSED in problem for _, problem in self._found)

    def add(self, row: Row, problem: str) -> None:
        self._found.append((Row({}, row.file, row.number), problem))

    def note(self, read: TextRow) -> None:
        """Note what is wrong with a row."""
        if read.row.problem:
            self.add(read.row, read.row.problem)
            return
        file, settings = read.row.file, {name: setting for setting in USUAL for name in self._columns.needed(setting)}
        for column in read.lacking:
            setting = settings[column]
            if file not in self._read:
                self._absent.add((file, column))
                guessed = not self._columns.configured[setting] and setting not in self._columns.found
                others = [name for name in USUAL[setting] if guessed and name != column]
                nor = f" (nor {', '.join(others)})" if others else ""
                has = _column_list([column, *others, *(_LIKELY[setting] if guessed else ())], read.row.values, settings)
                remedy = f"set `{setting}` (`swarm new`: --{setting}; `swarm task`: --columns) to the {setting}s' column"
                self.add(Row({}, file, 0), f"there is no column {column!r}{nor}; its columns are {has}; {remedy}")
            elif (file, column) not in self._absent:
                has = _column_list([column], read.row.values)
                remedy = f"give it one, remove it, or set `{setting}` to another column"
                self.add(read.row, f"this row has no {column!r}, only {has}: {remedy}")
        self._read.add(file)
        for problem in read.problems:
            self.add(read.row, problem)

    def lines(self) -> list[str]:
        """One line per mistake, in the order of the rows, and how many are left out."""
        found = sorted(self._found, key=lambda each: each[0][1:3])
        return first_of([f"{row.place}: {problem}" for row, problem in found], at_least=self.full)


def first_of(lines: Sequence[str], *, at_least: bool = False) -> list[str]:
    """The first lines, and a last one that counts the others. `at_least`: there may be more."""
    left = len(lines) - MOST_TOLD
    if left <= 0:
        return list(lines)
    return [*lines[:MOST_TOLD], f"and {'at least ' if at_least else ''}{left:,} more"]


def _column_list(meant: Sequence[str], names: Iterable[str], taken: Iterable[str] = ()) -> str:
    """A file's columns, and which of them may have been meant: none that another setting names."""
    others = sorted({*names}.difference(taken))
    hint = next(filter(None, (did_you_mean(column, others) for column in meant)), "")
    return (listed(sorted(names), NAMES_TOLD, _NAME_TOLD_CHARS) or "(none)") + (f" ({visible(hint)})" if hint else "")

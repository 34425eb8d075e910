"""Tasks from the user's own file: `[[tasks]]` with `source = "file"`.

The file is read once, at the start, into questions and answers as text. The dataset is named after
the rows: `file_` and the first 40 digits of a hash over all of them in order. So nodes with the
same rows have the same tasks, whatever the file's format, and a reference to rows that a node does
not have can never be mistaken for one to its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shared.os_words import in_words
from shared.tasks.derive import TaskConfigError
from shared.tasks.file_apart import texts_apart
from shared.tasks.file_formats import FileSourceError, data_files
from shared.tasks.file_rows import FileRows, RowsWriter, hold
from shared.tasks.file_texts import checked_texts

if TYPE_CHECKING:
    from shared.config import NodeConfig, TaskSpec

MAX_ROWS = 5_000_000
MAX_BYTES = 2 * 2**30
"""Largest number of rows and of UTF-8 bytes: what a node can hold and look through when it
starts.
"""


class _Key(NamedTuple):
    files: tuple[tuple[str, int, int], ...]
    question: str
    answer: str


_read: dict[_Key, FileRows] = {}


def load_rows(spec: TaskSpec) -> FileRows:
    """The rows of a file source, which this process holds from now on. A file is read only once
    while it does not change.

    Raises:
        FileSourceError: the message names the file, and the line or row if there is one.
    """
    files = data_files(Path(spec.path))
    try:
        stats = [(str(file.absolute()), file.stat()) for file in files]
    except OSError as error:
        raise FileSourceError(f"{spec.path}: cannot be read ({in_words(error)}): let this user read it") from None
    key = _Key(tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats), spec.question, spec.answer)
    if key not in _read:
        if sum(stat.st_size for _, stat in stats) > MAX_BYTES:
            raise FileSourceError(f"{spec.path}: {_too_large()}")
        _read[key] = _packed(spec, files)
    hold(_read[key])
    return _read[key]


def with_rows(specs: Sequence[TaskSpec]) -> list[TaskSpec]:
    """The same sources, with each file's `dataset` set to the name of its rows.

    Raises:
        TaskConfigError: with one line for each unusable file.
    """
    named, problems = [], []
    for position, spec in enumerate(specs):
        try:
            named.append(with_row_name(spec))
        except FileSourceError as error:
            problems.append((position, str(error)))
    if problems:
        raise TaskConfigError("task_config", told(problems))
    return named


def told(problems: Iterable[tuple[int, str]]) -> str:
    """Problems of task sources as a message: each source's place in the list, and what is wrong."""
    return "task sources cannot be used:\n" + "\n".join(f"  tasks[{place}] {problem}" for place, problem in problems)


def config_with_rows(config: NodeConfig) -> NodeConfig:
    """`with_rows` for a whole configuration.

    Raises:
        TaskConfigError: as `with_rows`.
    """
    if all(spec.source != "file" for spec in config.tasks):
        return config
    return config.model_copy(update={"tasks": with_rows(config.tasks)})


def with_row_name(spec: TaskSpec) -> TaskSpec:
    """The same source; a file's `dataset` is the name of its rows. Raises FileSourceError."""
    if spec.source != "file":
        return spec
    name = load_rows(spec).name
    if spec.dataset not in {"", name}:
        raise FileSourceError(
            f"{spec.path}: its rows are those of {name}, not of {spec.dataset}: use the file that was meant, or omit `dataset`"
        )
    return spec.model_copy(update={"dataset": name})


def _packed(spec: TaskSpec, files: Sequence[Path]) -> FileRows:
    """Checked rows in an unnamed temporary file, which is deleted when no process has it open. Two
    different answers to one question are refused, because whichever is right, the other would be
    rewarded as well.
    """
    try:
        with tempfile.TemporaryFile() as file, closing(_texts(spec, files)) as texts:
            writer = RowsWriter(cast(Any, file))
            for question, answer in texts:
                writer.add(question, answer)
                if writer.text_bytes > MAX_BYTES or len(writer) > MAX_ROWS:
                    raise FileSourceError(f"{spec.path}: {_too_large()}")
            if not len(writer):
                raise FileSourceError(f"{spec.path}: it has no rows: write at least one with a question and an answer")
            rows = writer.finish(spec.path)
    except OSError as error:
        raise FileSourceError(
            f"{spec.path}: its rows cannot be kept in {tempfile.gettempdir()} ({in_words(error)}): make room there or set TMPDIR"
        ) from None
    found = rows.contradiction()
    if found is not None:
        question = rows.row(found[0])[0]
        raise FileSourceError(
            f"{spec.path}: rows {found[0] + 1} and {found[1] + 1} have the same question, {question[:80]!r}, and different "
            "answers, "
            f"{rows.row(found[0])[1][:40]!r} and {rows.row(found[1])[1][:40]!r}: keep one of them"
        )
    return rows


def _texts(spec: TaskSpec, files: Sequence[Path]) -> Generator[tuple[str, str]]:
    if all(file.suffix == ".jsonl" for file in files):
        yield from checked_texts(files, spec.question, spec.answer)
    else:
        yield from texts_apart(files, spec.question, spec.answer)


def _too_large() -> str:
    return f"more than {MAX_ROWS:,} rows or {MAX_BYTES / 2**30:g} GiB: a node holds no more; split it, and give each node a part"

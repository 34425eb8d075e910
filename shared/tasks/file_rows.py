"""The rows of task files, as every process of a node holds them: packed into one unnamed,
memory-mapped file and never read again.

A process holds the rows of the files in its own configuration (`shared.tasks.file_source` reads
them). It passes them to its scorer processes as open files, before these give up access to all
files. So a file that changes on disk does not affect a running process, all processes share one
copy in memory, and no name from outside ever makes a process open a file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from shared.tasks.prompt import question_key

NAME_PREFIX = "file_"
_NAME_DIGITS = 40
_DOMAIN = b"swarm task rows 1\x00"
_ENTRY_BYTES = 8
_TEXTS = 3
"""Of a row: question, answer, and what else its reward gets."""
_WORD = re.compile(r"\w+(?:[.,/]\w+)*")
_END_CHARS = 200


class Asked(NamedTuple):
    """Numbers by which a row is known again in another form, under another template or system
    message. `question`: of the values of the columns that its template inserts, in the order of
    their names, or of the texts of its messages, with the answer's last word; `system`: of its
    system messages, 0 without.
    """

    question: int
    system: int = 0


def asked_of(values: Iterable[str], answer: str, system: str = "") -> Asked:
    """Without the answer, two templates that ask two different things of one text would be alike;
    of the answer only the last word counts, so that `#### 72` and `72` are alike.
    """
    words = _WORD.findall(answer[-_END_CHARS:])
    word = words[-1].replace(",", "") if words else answer
    texts = "\0".join(question_key(each) for each in (*values, word))
    return Asked(_hash(texts.encode()), _hash(question_key(system).encode()) if system else 0)


class RowLocations:
    """Where each row is in the user's files: blank lines and rows with mistakes are not held."""

    def __init__(self) -> None:
        self._files: list[Path] = []
        self._starts: list[int] = []
        self._numbers = array("I")

    def add(self, file: Path, number: int) -> None:
        if not self._files or self._files[-1] != file:
            self._files.append(file)
            self._starts.append(len(self._numbers))
        self._numbers.append(number)

    def of(self, index: int) -> tuple[Path, int]:
        return self._files[bisect_right(self._starts, index) - 1], self._numbers[index]


class FileRows:
    """Questions and answers in order, and the name derived from them."""

    def __init__(
        self,
        name: str,
        descriptor: int,
        count: int,
        where: str = "",
        hashes: Sequence[int] | None = None,
        places: RowLocations | None = None,
        asked: Sequence[int] = (),
    ) -> None:
        """`descriptor`: an open file as `RowsWriter` writes it, kept open. `where`: the file's name
        in error messages. `hashes`: of the questions. `places`: of the rows in the user's files.
        `asked`: of each row the number that rows of other files have too if they ask the same.
        Set by the reader: `note`, what a user should know of how the file was read; `columns`,
        those that question and answer are read from, by setting; `names`, all that the file has;
        `used`, those of them that its reward gets;
        `questions_name`, the name without those.
        """
        self.name = name
        self.questions_name = name
        self.descriptor = descriptor
        self.where = where
        self.places = places
        self.note = ""
        self.columns: dict[str, str] = {}
        self.names: list[str] = []
        self.used: list[str] = []
        self._count = count
        self.size_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size_bytes, access=mmap.ACCESS_READ)
        self._ends = memoryview(self._map)[self.size_bytes - _TEXTS * _ENTRY_BYTES * count :].cast("Q")
        self._hashes = hashes
        self._asked = asked
        self._distinct: int | None = None

    def __len__(self) -> int:
        return self._count

    def row(self, index: int) -> tuple[str, str]:
        start = self._ends[_TEXTS * index - 1] if index else 0
        middle, end, _ = self._ends[_TEXTS * index : _TEXTS * (index + 1)]
        return self._map[start:middle].decode(), self._map[middle:end].decode()

    def given_columns(self, index: int, question: str) -> dict[str, Any]:
        """The row's columns by name, for its reward, as they are in the file; those of question and
        answer also under these names. Each call makes them anew. `question`: as it is asked.
        """
        _, answer = self.row(index)
        _, start, end = self._ends[_TEXTS * index : _TEXTS * (index + 1)]
        further = json.loads(self._map[start:end].decode() or "{}")
        texts = {"question": question, "answer": further.get("answer", answer)}
        read = {name: texts[setting] for setting, name in self.columns.items()}
        columns: dict[str, Any] = texts | dict.fromkeys(self.used) | read | further.get("columns", {})
        return columns

    def ground_truth(self, index: int) -> Any:
        """The reference answer, if the reward reads columns with its type in the file."""
        _, start, end = self._ends[_TEXTS * index : _TEXTS * (index + 1)]
        return json.loads(self._map[start:end].decode() or "{}").get("answer", self.row(index)[1])

    def is_messages(self, index: int) -> bool:
        """Check whether the prompt was given as messages, and not as a text. Of one message it is
        known only if a reward may get messages (`shared.reward_files.may_get_messages`).
        """
        _, start, end = self._ends[_TEXTS * index : _TEXTS * (index + 1)]
        question, _ = self.row(index)
        return question.startswith("\0") or json.loads(self._map[start:end].decode() or "{}").get("messages", False)

    def question_bytes(self, index: int) -> bytes:
        return self._map[self._ends[_TEXTS * index - 1] if index else 0 : self._ends[_TEXTS * index]]

    def asked(self, index: int) -> Sequence[int]:
        """The number of what the row asks, by which rows of all files are compared in whatever
        form; empty if it is not known, or for an index beyond the rows.
        """
        return self._asked[index : index + 1]

    def shuffled(self, draw: int) -> Iterator[int]:
        """All row numbers in an order determined by `draw` and the hashes of the questions, the
        same on every node with these rows.

        Rows with the same question are adjacent, wherever they are in the file.
        """
        mixed = np.asarray(self._question_hashes(), dtype=np.uint64)
        with np.errstate(over="ignore"):
            mixed = (mixed ^ np.uint64(draw * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
            mixed ^= mixed >> np.uint64(31)
        yield from map(int, np.argsort(mixed, kind="stable"))

    def distinct_questions(self) -> int:
        """Number of questions that are different for evaluation (`HeldOut`): one that is held out
        takes all that differ from it only in case, spacing or form out of training.
        """
        if self._distinct is None:
            questions = (self.question_bytes(index).decode() for index in range(self._count))
            keys = array("Q", (_hash(question_key(question).encode()) for question in questions))
            self._distinct = min(int(np.unique(np.asarray(each, dtype=np.uint64)).size) for each in (keys, self._asked) if each)
        return self._distinct

    def contradictions(self) -> Iterator[tuple[int, int]]:
        """Pairs of rows, the earlier first, with the same question and different answers.

        Here questions are the same only if they are equal character by character: case and spacing
        may be what is asked about (`Is "a" a capital letter?`, `Is "A" a capital letter?`).
        """
        hashes = np.asarray(self._question_hashes(), dtype=np.uint64)
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        for place in same:
            first, second = int(order[place]), int(order[place + 1])
            (question, answer), (other_question, other_answer) = self.row(first), self.row(second)
            if question == other_question and answer != other_answer:
                yield first, second

    def _question_hashes(self) -> Sequence[int]:
        if self._hashes is None:
            self._hashes = array("Q", (_hash(self.question_bytes(index)) for index in range(self._count)))
        return self._hashes


class RowsWriter:
    """Packs rows into an open file as they are read: first all texts, then the offset of each
    text's end as a 64-bit number.
    """

    def __init__(self, file: BinaryIO) -> None:
        """`file`: empty and unnamed; the caller does not close it."""
        self._file = file
        self._digest = hashlib.sha256(_DOMAIN)
        self._further = hashlib.sha256()
        self._has_further = False
        self._ends = array("Q")
        self._hashes = array("Q")
        self._asked, self._systems = array("Q"), array("Q")
        self._places = RowLocations()
        self.text_bytes = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, question: str, answer: str, further: str, asked: Asked, file: Path, number: int) -> None:
        """Append a row, which is the `number`th of `file`. `further`: as
        `shared.tasks.file_columns.Columns.further` writes it.

        Raises:
            UnicodeEncodeError: a text contains a lone surrogate.
        """
        texts = [question.encode(), answer.encode(), further.encode()]
        for packed in texts:
            (self._further if packed is texts[-1] else self._digest).update(len(packed).to_bytes(8, "little") + packed)
            self._file.write(packed)
            self.text_bytes += len(packed)
            self._ends.append(self.text_bytes)
        self._has_further |= bool(further)
        self._hashes.append(_hash(texts[0]))
        self._asked.append(asked.question)
        self._systems.append(asked.system)
        self._places.add(file, number)

    def finish(self, where: str) -> FileRows:
        self._file.write(bytes(-self.text_bytes % _ENTRY_BYTES))
        self._file.write(self._ends.tobytes())
        self._file.flush()
        questions_name = NAME_PREFIX + self._digest.hexdigest()[:_NAME_DIGITS]
        if self._has_further:  # without, the name is the same whatever the reward
            self._digest.update(_DOMAIN + self._further.digest())
        name = NAME_PREFIX + self._digest.hexdigest()[:_NAME_DIGITS]
        rows = FileRows(name, os.dup(self._file.fileno()), len(self), where, self._hashes, self._places, self._numbers())
        rows.questions_name = questions_name
        return rows

    def _numbers(self) -> Sequence[int]:
        """Of each row, what it asks. A system message is the form of a question, except where it
        alone tells rows apart and is of one question only: then it holds what is asked about.
        """
        if not any(self._systems):
            return self._asked
        asked, systems = (np.asarray(each, dtype=np.uint64) for each in (self._asked, self._systems))
        pairs = np.unique(np.stack([asked, systems], axis=1), axis=0)
        (questions, forms), (texts, uses) = (np.unique(pairs[:, side], return_counts=True) for side in (0, 1))
        told_apart = (forms[np.searchsorted(questions, asked)] > 1) & (uses[np.searchsorted(texts, systems)] == 1)
        with np.errstate(over="ignore"):
            mixed = asked ^ (systems * np.uint64(0x9E3779B97F4A7C15))
        return array("Q", np.where(told_apart, mixed, asked).tobytes())


_held: dict[str, FileRows] = {}


def register_rows(rows: FileRows) -> None:
    """Make the tasks of these rows derivable in this process."""
    _held.setdefault(rows.name, rows)


def find_rows(name: str) -> FileRows | None:
    """The rows of this name, if this process's own configuration contains them."""
    return _held.get(name)


def is_file_name(dataset: str) -> bool:
    """Check whether a dataset's name is that of a file's rows, on whatever node."""
    return dataset.startswith(NAME_PREFIX)


def find_all_rows(datasets: Iterable[str]) -> list[FileRows]:
    """The rows among these datasets, each once."""
    return [rows for name in dict.fromkeys(datasets) if (rows := find_rows(name)) is not None]


def inheritance(all_rows: Iterable[FileRows]) -> str:
    """A text that tells a child process which rows it inherits as open files."""
    return json.dumps([[rows.name, rows.descriptor, len(rows), rows.columns, rows.used] for rows in all_rows])


def register_inherited_rows(text: str) -> int:
    """Hold the rows that `inheritance` lists and close the files. Returns the bytes of address
    space that they take.
    """
    mapped = 0
    for name, descriptor, count, columns, used in json.loads(text):
        rows = FileRows(name, descriptor, count)
        rows.columns, rows.used = columns, used
        os.close(rows.descriptor)
        register_rows(rows)
        mapped += -(-rows.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return mapped


def _hash(question: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(question, digest_size=8).digest(), "little")


# What a process that has read a file of rows tells one that has not.


@dataclass(frozen=True, slots=True)
class FileQuestions:
    """Count of a file source's different questions; `held_out` of them are never trained on.
    `left_out`: lines that say which rows are not used, as no answer to them earns full marks; empty
    if all are. `place`: as in `shared.tasks.specs.source_problems`; `part`: the part of all groups
    that are of this source. `note`: what a user should know of how it was read.
    """

    place: int
    path: str
    questions: int
    held_out: int
    part: float
    left_out: tuple[str, ...] = ()
    note: str = ""

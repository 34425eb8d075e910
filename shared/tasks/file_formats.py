"""Lists the files of a task source and reads their rows one by one: JSON lines, Parquet, and
folders of Hugging Face `datasets`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.contracts.limits import MAX_TEXT_CHARS
from shared.tasks.answers import MAX_ANSWER_CHARS
from shared.text import error_text, visible

if TYPE_CHECKING:
    from shared.tasks.file_rows import FileRows

SUFFIXES = (".arrow", ".parquet", ".jsonl")
"""Formats that are read."""
_BATCH_ROWS = 256
_MAX_DIFFERENT_BYTES = 4 * 2**20
"""Different texts of a Parquet column that are kept apart from the rows, if they are many."""
MAX_VALUE_BYTES = 4 * MAX_TEXT_CHARS
"""The longest text that a message can hold, in UTF-8. A Parquet file of a kilobyte may repeat one
of a gigabyte a million times, so what is longer is refused before it is unfolded.
"""
MAX_LINE_BYTES = 16 * 2**20
"""The longest line of a .jsonl file, and of a folder's state file. Two texts of the longest kind,
every character escaped, take 6 MiB; a line may have other columns. Parsed, it may take twenty times
as much memory.
"""
_OTHER_KINDS = {
    b"\x1f\x8b": "compressed with gzip: unpack it (gunzip)",
    b"PK\x03\x04": "a zip archive: unpack it (unzip)",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it (unzstd)",
    b"\xfd7zXZ\x00": "compressed with xz: unpack it (unxz)",
    b"BZh": "compressed with bzip2: unpack it (bunzip2)",
    b"PAR1": "a Parquet file: give it a name that ends in .parquet",
    b"ARROW1": "an Arrow file: give it a name that ends in .arrow, in a folder",
    b"\xff\xfe": "in UTF-16: save it in UTF-8",
    b"\xfe\xff": "in UTF-16: save it in UTF-8",
    b"version https://git-lfs": "a pointer of Git LFS: fetch the file (git lfs pull)",
}
"""What a file is that begins like this and is given as .jsonl."""
_COUNTERS = re.compile(r"(?<![^\W_])[0-9a-f]{16,}(?![^\W_])|\d+(?:[\W_]*of[\W_]*\d+)?")
"""What tells the parts of one dataset apart in their names, in lower case: numbers (also
`00000-of-00002`), and the hashes that older versions of `datasets` put behind them.
"""
_NAMES_TOLD = 5

_UNREADABLE = (ValueError, OverflowError, KeyError)
"""What pyarrow raises for a value that no Python object can represent: text that is not UTF-8, a
time beyond the year 9999, an unknown time zone.
"""


class FileSourceError(ValueError):
    """A file cannot be used as a task source. Each line of the message names the file, the place in
    it, the cause and the remedy. `rest`: the rows without mistakes, so that they can be checked
    further; None if there are none. `unread`: number of mistakes in the others.
    """

    def __init__(self, message: str, rest: FileRows | None = None, unread: int = 0) -> None:
        super().__init__(message)
        self.rest = rest
        self.unread = unread


class Row(NamedTuple):
    """Values by column, and where the row is: its number in `file`, from 1; 0 for the file itself.
    `problem`: why it could not be read; empty if it could.
    """

    values: Mapping[str, Any]
    file: Path
    number: int
    problem: str = ""

    @property
    def place(self) -> str:
        return place_in(self.file, self.number)


def place_in(file: Path, number: int) -> str:
    """A row's place for error messages."""
    return f"{file}: {'line' if file.suffix == '.jsonl' else 'row'} {number}" if number else str(file)


def data_files(path: Path) -> list[Path]:
    """The files to read, in order: the file itself, or those of a folder.

    Raises:
        FileSourceError: there is nothing at `path`, or nothing that can be read as rows.
    """
    try:
        return _found(path)
    except OSError as error:
        raise FileSourceError(f"{path}: cannot be accessed ({error.strerror}): correct `path`, or let this user read it") from None


def _found(path: Path) -> list[Path]:
    if not path.exists():
        raise FileSourceError(f"{path}: no such file or folder (from {Path.cwd()}): correct `path`")
    if path.is_dir():
        return _in_folder(path)
    if path.suffix not in SUFFIXES:
        if kind := _other_kind(path):
            raise FileSourceError(f"{path}: it is {kind}")
        raise FileSourceError(
            f"{path}: an unknown kind of file: give a .jsonl or .parquet file, or a folder that `datasets` saved with save_to_disk"
        )
    return [path]


def rows_of(files: Sequence[Path], columns: Sequence[str]) -> Iterator[Row]:
    """All rows in order, and one with a `problem` for each line or file that cannot be read. From
    Parquet and Arrow files, only `columns` are read.

    Raises:
        FileSourceError: the package that reads such files is not installed.
    """
    for file in files:
        try:
            yield from (_json_lines(file) if file.suffix == ".jsonl" else _tabular(file, columns))
        except OSError as error:
            yield Row({}, file, 0, f"cannot be read ({error_text(error)}): let this user read it, or copy it again")


def _in_folder(folder: Path) -> list[Path]:
    """Splits are never mixed, because training on the test split is a mistake that no metric would
    reveal. A folder written by `save_to_disk` lists its own files. In any other folder the files
    must have one name apart from numbers, because a split can be called anything (`holdout`), and
    one format, because a second one may hold the same rows again or the rest of them.
    """
    splits = sorted(path.parent.name for path in folder.glob("*/dataset_info.json"))
    if (folder / "dataset_dict.json").is_file() or (splits and not (folder / "dataset_info.json").is_file()):
        named = ", ".join(splits) or "none that is complete"
        raise FileSourceError(
            f"{folder}: it holds several splits ({named}): name one, path = {str(folder / (splits or ['train'])[0])!r}"
        )
    saved = _saved_files(folder)
    if saved:
        return saved
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise FileSourceError(f"{folder}: the folder holds no {', '.join(SUFFIXES)} file: give the folder that save_to_disk wrote")
    names = {_without_counters(path.stem): path.name for path in reversed(files)}
    if len(names) > 1:
        told = ", ".join(visible(name, 100) for name in sorted(names.values())[:_NAMES_TOLD])
        more = f" and {len(names) - _NAMES_TOLD:,} more" if len(names) > _NAMES_TOLD else ""
        raise FileSourceError(
            f"{folder}: it holds files of different names ({told}{more}), which may be different splits: name one file, or put "
            "the files of one split into a folder of their own; files that belong together have one name apart from numbers "
            "(train-0.jsonl, train-1.jsonl)"
        )
    formats = {path.suffix: visible(path.name, 100) for path in reversed(files)}
    if len(formats) > 1:
        told = ", ".join(f"{suffix}, such as {formats[suffix]}" for suffix in sorted(formats))
        raise FileSourceError(
            f"{folder}: it holds files of {len(formats)} formats ({told}), which may be the same rows twice or two parts of them: "
            "name one file, put the files of one format into a folder of their own, or write all in one format"
        )
    return files


def _without_counters(stem: str) -> str:
    """The words that the parts of one dataset have in common in their names, in lower case."""
    return " ".join(re.sub(r"[\W_]+", " ", _COUNTERS.sub(" ", stem.casefold())).split())


def _saved_files(folder: Path) -> list[Path]:
    """The files of a dataset saved by `save_to_disk`, from its state file; empty for another
    folder.
    """
    state = folder / "state.json"
    if not state.is_file():
        return []
    try:
        with state.open("rb") as file_of_state:
            names = json.loads(file_of_state.read(MAX_LINE_BYTES))["_data_files"]
        files = [folder / Path(entry["filename"]).name for entry in names]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise FileSourceError(f"{state}: cannot be read ({type(error).__name__}): save the dataset again") from None
    for file in files:
        if not file.is_file():
            raise FileSourceError(f"{file}: the folder's state.json names it, but it is missing: copy the whole folder")
    return files


def _other_kind(file: Path) -> str:
    """Say what a file is instead of rows of JSON, and what to do; empty if that cannot be seen."""
    with file.open("rb") as stream:
        begin = stream.read(max(map(len, _OTHER_KINDS)))
    return next((kind for signature, kind in _OTHER_KINDS.items() if begin.startswith(signature)), "")


class _Twice(dict[str, Any]):
    """An object of JSON with a key that stands twice, of which Python would keep the last value."""

    key = ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    twice = _Twice(values)
    twice.key = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return twice


def _json_lines(file: Path) -> Iterator[Row]:
    """Reads line by line, because files have millions of lines. The first line may begin with a
    byte-order mark, which editors on Windows write.
    """
    if kind := _other_kind(file):
        yield Row({}, file, 0, f"it is {kind}")
        return
    with file.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), b""), 1):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield Row({}, file, number, f"longer than {MAX_LINE_BYTES:,} bytes: write one object per line, or shorten it")
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                values = json.loads(
                    text.rstrip(), parse_float=exact_number, object_pairs_hook=_unique
                )  # not stripped, a torn line's error is on its "line 2"
            except UnicodeDecodeError:
                yield Row({}, file, number, "not UTF-8: save the file in UTF-8")
            except (ValueError, RecursionError) as error:
                yield Row({}, file, number, f"not JSON ({str(error)[:100]}): write one object per line")
            else:
                wrong = "" if isinstance(values, dict) else 'not a JSON object: write {"question": "...", "answer": "..."}'
                if type(values) is _Twice:
                    wrong = f"the key {visible(values.key, 100)!r} stands twice: keep one of them"
                yield Row({} if wrong else values, file, number, wrong)


def _tabular(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Reads a batch of rows at a time, so that a file need not fit into memory. If columns are
    missing, each row also has the columns that exist, without values, so that the caller's message
    can list them.
    """
    arrow = require_pyarrow()
    number = 0
    try:
        for batch in _batches(arrow, file, columns):
            names = [name for name in columns if name in batch.schema.names]
            if twice := [name for name in names if batch.schema.names.count(name) > 1]:
                yield Row({}, file, 0, f"it has several columns {twice[0]!r}: rename or remove all but one")
                return
            lists = [_values(arrow, batch.column(batch.schema.names.index(name))) for name in names]
            others = {} if len(names) == len(columns) else dict.fromkeys(batch.schema.names)
            for place in range(batch.num_rows):
                number += 1
                yield Row({**others, **{name: values[place] for name, values in zip(names, lists, strict=True)}}, file, number)
    except MemoryError:
        raise
    except arrow.ArrowException as error:
        yield Row({}, file, 0, f"cannot be read as {file.suffix[1:]}: {str(error).strip()[:200]}: write it again")


def _batches(arrow: ModuleType, file: Path, columns: Sequence[str]) -> Iterator[Any]:
    if file.suffix == ".parquet":
        yield from _parquet_batches(arrow, file, columns)
        return
    with arrow.memory_map(str(file)) as source:
        try:
            reader: Any = arrow.ipc.open_stream(source)
        except arrow.ArrowInvalid:
            reader = arrow.ipc.open_file(source)
            yield from (reader.get_batch(place) for place in range(reader.num_record_batches))
            return
        yield from reader


def _parquet_batches(arrow: ModuleType, file: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Equal texts stay one text, as they are in the file, while there are few different ones: each
    batch comes with all texts of its row group so far, which for many would take quadratic time.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(str(file)) as table:
        schema = table.schema_arrow
    # If the table lacks the column, the error message lists the ones that exist.
    wanted = list(dict.fromkeys(columns)) if set(columns) <= set(schema.names) else schema.names
    # By field, because two columns may have one name.
    texts = list({field.name for field in schema if field.name in wanted and arrow.types.is_string(field.type)})
    done = 0
    with parquet.ParquetFile(str(file), read_dictionary=texts) as table:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=wanted, use_threads=False):
            yield batch
            done += batch.num_rows
            if any(_has_many_texts(arrow, column) for column in batch.columns):
                break
        else:
            return
    with parquet.ParquetFile(str(file)) as table:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=wanted, use_threads=False):
            if done < batch.num_rows:
                yield batch.slice(done)
            done = max(0, done - batch.num_rows)


def _has_many_texts(arrow: ModuleType, column: Any) -> bool:
    if not arrow.types.is_dictionary(column.type):
        return False
    return len(column.dictionary) > _BATCH_ROWS and column.dictionary.nbytes > _MAX_DIFFERENT_BYTES


def _values(arrow: ModuleType, column: Any) -> list[Any]:
    """The column's values; `Unusable` for those too long, or that Python cannot represent."""
    long = _too_long(arrow, column)
    if not long:
        try:
            return _plain_values(arrow, column)
        except _UNREADABLE:
            pass  # then value by value, to find out which
    return [_too_long_to_use if place in long else _one_value(arrow, value) for place, value in enumerate(column)]


def _plain_values(arrow: ModuleType, column: Any) -> list[Any]:
    if arrow.types.is_dictionary(column.type):
        places = column.indices.to_pylist()
        known = {place: column.dictionary[place].as_py() for place in set(places) if place is not None}
        values = [None if place is None else known[place] for place in places]
    else:
        values = column.to_pylist()
    kind = _kind(arrow, column)
    if not arrow.types.is_float32(kind) and not arrow.types.is_float16(kind):
        return values
    import numpy as np

    narrow = np.float32 if arrow.types.is_float32(kind) else np.float16
    return [None if value is None else _as_meant(narrow(value)) for value in values]


def _as_meant(number: Any) -> float | int:
    """A number of 32 or 16 bits. A fraction in the fewest digits that mean it: 0.1, which would be
    0.10000000149011612 as a double. Whole numbers in full: in the fewest digits, 123456792 would be
    123456790.
    """
    return int(number) if float(number).is_integer() else float(str(number))


def _one_value(arrow: ModuleType, value: Any) -> Any:
    try:
        return value.as_py()
    except _UNREADABLE as error:
        return Unusable(f"its {_kind(arrow, value)} cannot be read ({str(error)[:100]}): write it as text")


def _kind(arrow: ModuleType, column: Any) -> Any:
    """The type of its values."""
    return column.type.value_type if arrow.types.is_dictionary(column.type) else column.type


def _too_long(arrow: ModuleType, column: Any) -> frozenset[int]:
    """The places (from 0) of texts and bytes longer than `MAX_VALUE_BYTES`."""
    kind = _kind(arrow, column)
    if not any(check(kind) for check in (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_binary)):
        return frozenset()
    from pyarrow import compute

    folded = arrow.types.is_dictionary(column.type)
    lengths = compute.binary_length(column.dictionary if folded else column)
    if folded:
        lengths = lengths.take(column.indices)
    if (compute.max(lengths).as_py() or 0) <= MAX_VALUE_BYTES:
        return frozenset()
    return frozenset(place for place, length in enumerate(lengths.to_pylist()) if (length or 0) > MAX_VALUE_BYTES)


def require_pyarrow() -> ModuleType:
    """The library that reads Parquet and Arrow files. Raises FileSourceError if it is not
    installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise FileSourceError(
            "Parquet and Arrow files need pyarrow, which is not installed: pip install 'swarm-rl[data]', or give a .jsonl file"
        ) from None
    module: ModuleType = pyarrow
    return module


# Converts a value from a file to text: the same value gives the same text, whatever format it was
# stored in.


MAX_DIGITS = 4_300
"""Most digits of a number as text: what Python takes for a whole number in JSON. The ten characters
of `1e99999999` would else become a hundred million.
"""


class ValueProblem(ValueError):
    """A value cannot be a question or an answer. The message continues a sentence that begins with
    the column's name.
    """


class Unusable(NamedTuple):
    """Stands for a value that a file holds and that cannot be a question or an answer."""

    why: str


_too_long_to_use = Unusable(f"longer than {MAX_VALUE_BYTES:,} bytes, and a message holds {MAX_TEXT_CHARS:,} characters: shorten it")


def exact_number(literal: str) -> float | Decimal | Unusable:
    """A number of JSON that has a point or an exponent: a double if that is all that it says, and
    else a decimal, which Parquet can hold as well. Two numbers that differ in a digit that a double
    loses would be one answer, and their files one dataset.
    """
    number = float(literal)
    if repr(number) == literal or not math.isfinite(number):
        return number
    if len(literal) > MAX_DIGITS:
        return _too_many_digits
    if not literal.lower().partition("e")[0].strip("-0."):
        return number  # zero, whatever its exponent
    try:
        exact = Decimal(literal)
    except InvalidOperation:  # an exponent of twenty digits
        return _too_many_digits
    return number if exact == Decimal(repr(number)) else exact


_too_many_digits = Unusable(f"has more than {MAX_DIGITS:,} digits when written without exponent: shorten it, or write it as text")


def as_text(value: Any) -> str:
    """The value as text: text unchanged; numbers in digits, without exponent and superfluous zeros;
    `true` and `false`.

    3, 3.0 and the decimal 3.00 all become `3`, because file formats differ in which of them they
    can store.

    Raises:
        ValueProblem: null, not a finite number, one of more than `MAX_DIGITS` digits, composed of
            several values, or unusable.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Unusable):
        raise ValueProblem(value.why)
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        raise ValueProblem("has no value (null): give it one or remove the row")
    if isinstance(value, int):
        return _digits(Decimal(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueProblem(f"is {value}, which is not a number that answers can be compared with: write it as text")
        return _digits(Decimal(repr(value)))
    if isinstance(value, Decimal) and value.is_finite():
        return _digits(value)
    if isinstance(value, list | tuple | dict):
        raise ValueProblem("consists of several values (a list or an object): make it one text or number")
    raise ValueProblem(f"is a {type(value).__name__}, neither text nor number: store it as text")


def _digits(value: Decimal) -> str:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), "an infinity or NaN, which the caller refuses"
    if max(value.adjusted() + 1, 1) + max(-exponent, 0) > MAX_DIGITS:
        raise ValueProblem(_too_many_digits.why)
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


# Rows of a task source's files as texts, each checked to be one that a message and a scorer can
# take.


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

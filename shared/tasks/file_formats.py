"""Lists the files of a task source and reads their rows one by one: JSON, CSV, Parquet, and folders
of Hugging Face `datasets`.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from shared.text import error_text, listed, visible

if TYPE_CHECKING:
    from shared.tasks.file_rows import FileRows

_BATCH_ROWS = 256
_CHUNK_BYTES = 2**16
MAX_LINE_BYTES = 16 * 2**20
"""The longest line of a .jsonl file, and the longest state file of a folder. Two texts of the
longest kind, every character escaped, take 6 MiB; a row may have other columns. Parsed, it may take
twenty times as much memory.
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
ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Files in folders of datasets that hold no rows."""
_NAMES_TOLD = 5
_AROUND = 40
"""Characters shown before and after the place where a list of JSON is broken."""

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
    return f"{file}: {'line' if file.suffix in _BY_LINE else 'row'} {number}" if number else str(file)


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
            f"{path}: an unknown kind of file: give {', '.join(SUFFIXES)}, or a folder that `datasets` saved with save_to_disk"
        )
    return [path]


Wanted = Callable[[Sequence[str], Callable[[str], bool]], Sequence[str]]
"""The columns that are read of a table, which has these names, and those columns of which the
function is true. A dot leads into a column of objects.
"""


def rows_of(files: Sequence[Path], wanted: Wanted) -> Iterator[Row]:
    """All rows in order, and one with a `problem` for each line or file that cannot be read. Of
    Parquet and Arrow files, only the columns `wanted` are read.

    Raises:
        FileSourceError: the package that reads such files is not installed.
    """
    for file in files:
        try:
            kind = "" if file.suffix in PACKED else _other_kind(file)
            yield from ([Row({}, file, 0, f"it is {kind}")] if kind else _READERS[file.suffix](file, wanted))
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
        raise FileSourceError(f"{folder}: it holds several splits ({named}): name one{_proposed(folder, splits)}")
    saved = _saved_files(folder)
    if saved:
        return saved
    files = sorted(path for path in folder.iterdir() if _holds_rows(path))
    if not files:
        folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and any(_holds_rows(file) for file in path.iterdir())]
        proposed = _proposed(folder, [path.name for path in folders])
        raise FileSourceError(f"{folder}: the folder holds no {', '.join(SUFFIXES)} file: give the folder of the rows{proposed}")
    kinds = {(_without_counters(path.stem), path.suffix): path.name for path in reversed(files)}
    if len(kinds) > 1:
        told = listed(sorted(kinds.values()), _NAMES_TOLD, 100)
        raise FileSourceError(
            f"{folder}: it holds files of different names or formats ({told}), which may be different splits or the same "
            "rows twice: name one file, or put the files of one split into a folder of their own; files that belong together have "
            f"one name apart from numbers (train-0.jsonl, train-1.jsonl){_proposed(folder, [path.name for path in files])}"
        )
    return files


def _holds_rows(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.name not in ABOUT and path.is_file()


def _proposed(folder: Path, names: Sequence[str]) -> str:
    """The path of the training split, if one of the names says that it is; no other is proposed."""
    training = [name for name in names if "train" in _without_counters(name.rpartition(".")[0] or name).split()]
    return f", path = {str(folder / training[0])!r}" if len(training) == 1 else ""


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


class Unusable(NamedTuple):
    """Stands for a value that a file holds and that cannot be a question or an answer."""

    why: str


MAX_DIGITS = 4_300
"""Most digits of a number as text: what Python takes for a whole number in JSON. The ten characters
of `1e99999999` would else become a hundred million.
"""
TOO_MANY_DIGITS = Unusable(f"has more than {MAX_DIGITS:,} digits when written without exponent: shorten it, or write it as text")


def exact_number(literal: str) -> Decimal | Unusable:
    """A number of JSON that has a point or an exponent, with all its digits: two that differ in one
    that a double loses would be one answer, and their files one dataset.
    """
    try:
        return Decimal(literal)
    except InvalidOperation:  # an exponent of twenty digits
        return TOO_MANY_DIGITS


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


def _json_lines(file: Path, _: Wanted) -> Iterator[Row]:
    """Reads line by line, because files have millions of lines. The first line may begin with a
    byte-order mark, which editors on Windows write.
    """
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
            except json.JSONDecodeError as error:
                # An object that has not ended where the line does may go on in the next one.
                ended = text.lstrip().startswith("{") and error.pos < len(text.rstrip())
                remedy = "correct this line" if ended else "write one object per line"
                yield Row({}, file, number, f"not JSON ({error.msg}, column {error.colno}): {remedy}")
            except (ValueError, RecursionError) as error:
                yield Row({}, file, number, f"not JSON ({str(error)[:100]}): write one object per line")
            else:
                yield _object(values, file, number)


def _object(values: Any, file: Path, number: int) -> Row:
    wrong = "" if isinstance(values, dict) else 'not a JSON object: write {"question": "...", "answer": "..."}'
    if isinstance(values, list) and file.suffix == ".jsonl":
        wrong += ", or call a file that is one list .json"
    if type(values) is _Twice:
        wrong = f"the key {visible(values.key, 100)!r} stands twice: keep one of them"
    return Row({} if wrong else values, file, number, wrong)


def _json(file: Path, wanted: Wanted) -> Iterator[Row]:
    """Reads a list of objects, all at once, or lines of them."""
    with file.open("rb") as stream:
        begin = stream.read(_CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    if begin.startswith(b"{"):
        yield from _json_lines(file, wanted)
        return
    try:
        rows = json.loads(file.read_text("utf-8-sig") or "[]", parse_float=exact_number, object_pairs_hook=_unique)
    except UnicodeDecodeError:
        yield Row({}, file, 0, "not UTF-8: save the file in UTF-8")
    except json.JSONDecodeError as error:
        yield Row({}, file, 0, _broken_list(error))
    except (ValueError, RecursionError):
        yield Row({}, file, 0, "not JSON (nested too deeply): write [{...}, {...}]")
    else:
        if not isinstance(rows, list):
            yield Row({}, file, 0, "not a list of JSON objects: write [{...}, {...}]")
            return
        yield from (_object(values, file, number) for number, values in enumerate(rows, 1))


def _broken_list(error: json.JSONDecodeError) -> str:
    """Say where a list of JSON is broken, with the text there, and what to do. A missing comma
    belongs behind the last value, which may end lines above the place where the parser misses it.
    """
    text, pos = error.doc, error.pos
    if not text.lstrip().startswith("["):
        return f"not JSON ({error.msg}, line {error.lineno}): write [{{...}}, {{...}}]"
    said, lacks, ends = error.msg, "delimiter" in error.msg, not text[pos:].strip()
    former = text[: pos + 1].rstrip(" \t\r\n]}")
    extra = not ends and former.endswith(",") and text[len(former) :].lstrip()[:1] in ("]", "}")
    if lacks or ends or extra:
        pos = len(former if extra else text[:pos].rstrip())
    begin, end, line = text.rfind("\n", 0, pos) + 1, (text + "\n").find("\n", pos), text.count("\n", 0, pos) + 1
    before = visible(text[max(begin, pos - _AROUND) : pos].strip(), 2 * _AROUND)
    around = visible(text[max(begin, pos - _AROUND // 2) : min(end, pos + _AROUND)].strip(), 2 * _AROUND)
    remedy = "correct it there"
    if ends:
        remedy = "it ends before its list does: close it, or copy the file again"
    elif extra:
        remedy = "remove the comma"
    elif lacks:
        remedy = f"write a {said.split()[1]} there, or a backslash before a quote within a text"
    return f"not JSON ({said}, line {line}, {f'after {before}' if lacks or ends or extra else f'at {around}'}): {remedy}"


def _separated(file: Path, _: Wanted) -> Iterator[Row]:
    """Reads CSV (RFC 4180) under a header line, with whatever separates most names there."""
    csv.field_size_limit(MAX_LINE_BYTES)
    names: list[str] = []
    with file.open(newline="", encoding="utf-8-sig") as stream:
        number = 1
        try:
            separator, above = _separator_of(stream)
            records = csv.reader(stream, delimiter=separator, strict=True)
            while True:
                number = above + records.line_num + 1
                try:
                    fields = next(records, None)
                except csv.Error as error:
                    remedy = "quote texts with quotes or line breaks, and write their quotes twice"
                    if error.args == (UNCLOSED,):
                        remedy = "a quote is opened in this row and not closed, so no later row was read: close it"
                    yield Row({}, file, number, f"not CSV ({error}): {remedy}")
                    continue
                if fields is None:
                    return
                if not names:
                    if not fields:
                        continue
                    names = [name.strip() for name in fields]
                    if len(set(names)) < len(names):
                        yield Row({}, file, number, _several(Counter(names).most_common(1)[0][0]))
                        return
                elif len(fields) == len(names):
                    yield Row(dict(zip(names, fields, strict=True)), file, number)
                elif fields:
                    parts = f"it has {len(fields)} fields, separated by {_SEPARATORS[separator]}, and the header {len(names)}"
                    many = len(fields) > len(names)
                    remedy = "quote texts that hold a separator" if many else "write an empty field for what is missing"
                    yield Row({}, file, number, f"{parts}: {remedy}")
        except UnicodeDecodeError:
            yield Row({}, file, number, "not UTF-8: save the file in UTF-8")


_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
UNCLOSED = "unexpected end of data"
"""The csv module's words for a quote that is open where the file ends."""


def _separator_of(stream: TextIO) -> tuple[str, int]:
    """What separates most names in the header, and how many lines are above it. Moves to the
    header. It is the first line with text. Excel may write `sep=;` above it, which decides.
    """
    given, above = "", 0
    while True:
        begin = stream.tell()
        line = stream.readline()
        text = line.strip().strip('"').lower()
        if text.startswith("sep=") and text[4:5] in _SEPARATORS and len(text) == 5:
            given = text[4]
        elif line.strip() or not line:
            break
        above += 1
    stream.seek(begin)
    names = re.sub('"[^"]*"', "", line)
    return given or max(_SEPARATORS, key=names.count), above


def _several(name: str) -> str:
    return f"it has several columns {visible(name, 100)!r}: rename or remove all but one"


def _tabular(file: Path, wanted: Wanted) -> Iterator[Row]:
    """Reads a batch of rows at a time, so that a file need not fit into memory. If columns are
    missing, each row also has the columns that exist, without values, so that the caller's message
    can list them.
    """
    arrow = require_pyarrow()
    number = 0
    try:
        for schema, batch in _batches(arrow, file, wanted):
            columns = wanted(schema.names, lambda name, schema=schema: bool(_path(arrow, schema, name)))  # type: ignore[misc]
            paths = {name: path for name in columns if (path := _path(arrow, schema, name))}
            if twice := [path[0] for path in paths.values() if schema.names.count(path[0]) > 1]:
                yield Row({}, file, 0, _several(twice[0]))
                return
            lists = [_values(arrow, _column(batch, path)) for path in paths.values()]
            others = {} if len(paths) == len(columns) else dict.fromkeys(_leaves(arrow, schema))
            for place in range(batch.num_rows):
                number += 1
                yield Row({**others, **{name: values[place] for name, values in zip(paths, lists, strict=True)}}, file, number)
    except MemoryError:
        raise
    except arrow.ArrowException as error:
        yield Row({}, file, 0, f"cannot be read as {file.suffix[1:]}: {str(error).strip()[:200]}: write it again")


def _path(arrow: ModuleType, fields: Any, name: str) -> list[str]:
    """The names that lead to a column, the outermost first; empty if there is none. fields: a
    schema, or the type of a column of objects.
    """
    types = {field.name: field.type for field in fields}
    if name in types:
        return [name]
    head, _, rest = name.partition(".")
    inner = _path(arrow, types[head], rest) if rest and head in types and arrow.types.is_struct(types[head]) else []
    return [head, *inner] if inner else []


def _leaves(arrow: ModuleType, fields: Any) -> Iterator[str]:
    for field in fields:
        yield field.name
        if arrow.types.is_struct(field.type):
            yield from (f"{field.name}.{inner.name}" for inner in field.type)


def _column(batch: Any, path: Sequence[str]) -> Any:
    from pyarrow import compute

    column = batch.column(batch.schema.names.index(path[0]))
    return compute.struct_field(column, list(path[1:])) if len(path) > 1 else column


def _batches(arrow: ModuleType, file: Path, wanted: Wanted) -> Iterator[tuple[Any, Any]]:
    """Batches of rows, each with the schema of the whole file."""
    if file.suffix == ".parquet":
        yield from _parquet_batches(arrow, file, wanted)
        return
    with arrow.memory_map(str(file)) as source:
        try:
            reader: Any = arrow.ipc.open_stream(source)
        except arrow.ArrowInvalid:
            reader = arrow.ipc.open_file(source)
            yield from ((reader.schema, reader.get_batch(place)) for place in range(reader.num_record_batches))
            return
        yield from ((reader.schema, batch) for batch in reader)


def _parquet_batches(arrow: ModuleType, file: Path, wanted: Wanted) -> Iterator[tuple[Any, Any]]:
    from pyarrow import parquet

    with parquet.ParquetFile(str(file)) as table:
        schema = table.schema_arrow
        paths = [_path(arrow, schema, name) for name in wanted(schema.names, lambda name: bool(_path(arrow, schema, name)))]
        columns = [".".join(path) for path in paths if path]
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns, use_threads=False):
            yield schema, batch


def _values(arrow: ModuleType, column: Any) -> list[Any]:
    """The column's values; `Unusable` for those that Python cannot represent."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        values = column.to_pylist()
    except _UNREADABLE:
        return [_one_value(value) for value in column]
    if not arrow.types.is_float32(column.type) and not arrow.types.is_float16(column.type):
        return values  # type: ignore[no-any-return]
    import numpy as np

    narrow = np.float32 if arrow.types.is_float32(column.type) else np.float16
    return [None if value is None else _as_meant(narrow(value)) for value in values]


def _as_meant(number: Any) -> float | int:
    """A number of 32 or 16 bits. A fraction in the fewest digits that mean it: 0.1, which would be
    0.10000000149011612 as a double. Whole numbers in full: in the fewest digits, 123456792 would be
    123456790.
    """
    return int(number) if float(number).is_integer() else float(str(number))


def _one_value(value: Any) -> Any:
    try:
        return value.as_py()
    except _UNREADABLE as error:
        return Unusable(f"its {value.type} cannot be read ({str(error)[:100]}): write it as text")


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


_READERS: dict[str, Callable[[Path, Wanted], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _tabular,
    ".arrow": _tabular,
}
"""By the ending of a file's name, what reads its rows."""
SUFFIXES = tuple(_READERS)
PACKED = (".parquet", ".arrow")
"""Formats that need pyarrow and may unfold to far more than the file is long."""
APART = (*PACKED, ".json", ".csv", ".tsv")
"""Formats whose rows are not limited by line, so that a process with little memory reads them."""
_BY_LINE = (".jsonl", ".csv", ".tsv")

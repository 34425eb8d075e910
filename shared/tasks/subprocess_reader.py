"""Reads files in a separate process with a limit on its memory. A Parquet file of a kilobyte can
unfold to gigabytes, and what it says about its own sizes need not be true; a list of JSON is read
as a whole.

That process runs `main`: the files and columns come as JSON on its standard input, and it writes
MessagePack to its standard output, a list for each row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

import msgpack

from shared.contracts.limits import MAX_TEXT_CHARS
from shared.runtime.process_limits import MappedMemory, ending_with_parent, limit, limit_data
from shared.tasks.file_columns import Columns, TextRow, text_rows
from shared.tasks.file_formats import PACKED, Row, require_pyarrow
from shared.tasks.file_rows import Asked
from shared.text import visible

MEMORY_BYTES = 768 * 2**20
"""What reading may take beyond the modules. A Parquet file with 280 texts of the longest kind in
one row group takes two thirds of it; files of ordinary questions take a few MiB.
"""
_MAX_ROW_BYTES = 16 * MAX_TEXT_CHARS
_COLUMNS, _ROW, _TOO_LARGE, _END = "columns", "row", "too large", "end"
_GONE_S = 10.0
"""What a process that has closed its output may take to end."""
_MAX_ERROR_BYTES = 4096
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from shared.tasks.subprocess_reader import main; main()"
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Else allocators and threads reserve gigabytes of address space, which is what is limited."""


def read_rows_in_subprocess(files: Sequence[Path], columns: Columns) -> Iterator[TextRow]:
    """As `text_rows`, with at most `MEMORY_BYTES` for reading. What takes more is
    the problem of a last row, as is the end of the process that reads.

    Raises:
        FileSourceError: pyarrow is needed and not installed.
    """
    if files[0].suffix in PACKED:
        require_pyarrow()
    used = None if columns.used is None else sorted(columns.used)
    parameters = columns.configured | {"used": used, "keeps_messages": columns.keeps_messages}
    asked = {"files": [str(file) for file in files], "columns": parameters}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | _ENVIRONMENT,
            preexec_fn=ending_with_parent(),
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(json.dumps(asked).encode())
            yield from _received(cast(BufferedReader, process.stdout), files, columns)
        except (EOFError, BrokenPipeError):
            ended = f"the process that read it {_end(process, errors)}: write it as .jsonl"
            yield TextRow(Row({}, _all_of(files), 0, ended))
        finally:
            process.kill()


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """Describe how a silent process ended, with the last line that it wrote to `errors`."""
    try:
        code = process.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "does not answer as it should"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}, perhaps for lack of memory"
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
    last = errors.read().decode(errors="replace").splitlines()[-1:] or ["without a word"]
    return f"ended with code {code} ({visible(last[0], 200)})"


def _received(out: BufferedReader, files: Sequence[Path], columns: Columns) -> Iterator[TextRow]:
    """Rows until the last one. Raises EOFError if what comes is no row, or no last one comes."""
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_ROW_BYTES)
    try:
        while chunk := out.read1():
            unpacker.feed(chunk)
            for kind, *told in unpacker:
                if kind == _COLUMNS:
                    columns.found, columns.passed_over, names = told
                    columns.names = dict.fromkeys(names)
                elif kind == _ROW:
                    file, number, problem, names, lacking, problems, texts, asked = told
                    place = Row(dict.fromkeys(names), files[file], number, problem)
                    yield TextRow(place, lacking, problems, tuple(texts), Asked(*asked))
                else:
                    if kind == _TOO_LARGE:
                        yield TextRow(Row({}, _all_of(files), 0, _TAKES_MORE))
                    return
    except (ValueError, TypeError, LookupError, msgpack.UnpackException):
        raise EOFError from None
    raise EOFError


_TAKES_MORE = (
    f"cannot be read within {MEMORY_BYTES // 2**20} MiB of memory: write it with fewer rows in each part (Parquet: "
    "row_group_size, Arrow: rows of a record batch), or as .jsonl"
)


def main() -> None:
    """Read what is asked for and write the rows."""
    asked = json.load(sys.stdin.buffer)
    files, columns = [Path(file) for file in asked["files"]], Columns(**asked["columns"])
    if files[0].suffix in PACKED:
        require_pyarrow()
        import numpy  # noqa: F401
        from pyarrow import compute, parquet  # noqa: F401

    numbers = {file: number for number, file in enumerate(files)}
    # What a library prints must not come between the rows.
    out = os.fdopen(os.dup(1), "wb", buffering=2**16)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # An Arrow file takes addresses but no memory: it is mapped.
    longest = max((file.stat().st_size for file in files if file.suffix == ".arrow" and file.is_file()), default=0)
    memory = MappedMemory()
    limit_data((memory.data_bytes() or 0) + MEMORY_BYTES)
    limit((memory.size_bytes() or 0) + longest + MEMORY_BYTES, processes=True)

    def write(*told: Any) -> None:
        out.write(msgpack.packb(told, unicode_errors="replace"))

    try:
        known: tuple[int, ...] = ()
        for read in text_rows(files, columns):
            if (found := (len(columns.found), len(columns.names))) != known:
                known = found
                write(_COLUMNS, columns.found, columns.passed_over, list(columns.names))
            row, wrong = read.row, (read.lacking, read.problems)
            write(_ROW, numbers[row.file], row.number, row.problem, list(row.values), *wrong, read.texts, read.asked)
        ended = _END
    except MemoryError:
        ended = _TOO_LARGE
    write(ended)  # what was read is freed by now, also where memory ran out
    out.close()


def _all_of(files: Sequence[Path]) -> Path:
    return files[0] if len(files) == 1 else files[0].parent

"""Reads Parquet and Arrow files in a separate process with a limit on its memory. A file of a
kilobyte can unfold to gigabytes, and what it says about its own sizes need not be true.

That process runs `main`: the files and columns come as JSON on its standard input, and it writes
a frame for each row to its standard output.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from shared.contracts.limits import MAX_TEXT_CHARS
from shared.runtime.process_limits import MappedMemory, ending_with_parent, limit, limit_data
from shared.tasks.file_columns import Columns, TextRow, text_rows
from shared.tasks.file_formats import Row, require_pyarrow
from shared.tasks.file_rows import Asked
from shared.text import visible

MEMORY_BYTES = 768 * 2**20
"""What reading may take beyond the modules. A Parquet file with 280 texts of the longest kind in
one row group takes two thirds of it; files of ordinary questions take a few MiB.
"""
_FRAME = struct.Struct("<cIIQQIII")
"""Kind; number of the file and of the row in it; numbers of `Asked`; sizes of three contents."""
_TEXTS, _WRONG, _COLUMNS, _TOO_LARGE, _END = b"t", b"w", b"c", b"m", b"."
_MAX_FRAME_BYTES = 4 * MAX_TEXT_CHARS
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
        FileSourceError: pyarrow is not installed.
    """
    require_pyarrow()
    used = None if columns.used is None else sorted(columns.used)
    asked = {"files": [str(file) for file in files], "columns": columns.configured | {"used": used}}
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
            yield from _received(process.stdout, files, columns)
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


def _received(frames: IO[bytes], files: Sequence[Path], columns: Columns) -> Iterator[TextRow]:
    """Rows until the last frame. Raises EOFError if there is no last frame."""
    while True:
        kind, file, number, asked, system, *sizes = _FRAME.unpack(_exactly(frames, _FRAME.size))
        if kind == _END:
            return
        if kind not in (_TEXTS, _WRONG, _COLUMNS, _TOO_LARGE) or max(sizes) > _MAX_FRAME_BYTES or file >= len(files):
            raise EOFError
        first, second, third = (_exactly(frames, size).decode(errors="replace") for size in sizes)
        if kind == _TEXTS:
            yield TextRow(Row({}, files[file], number), texts=(first, second, third), asked=Asked(asked, system))
        elif kind == _WRONG:
            wrong = json.loads(first)
            place = Row(dict.fromkeys(wrong["names"]), files[file], number, wrong["row"])
            yield TextRow(place, wrong["lacking"], wrong["problems"])
        elif kind == _COLUMNS:
            columns.found, columns.passed_over, columns.names = map(json.loads, (first, second, third))
        else:
            yield TextRow(Row({}, _all_of(files), 0, _TAKES_MORE))
            return


_TAKES_MORE = (
    f"cannot be read within {MEMORY_BYTES // 2**20} MiB of memory: write it with fewer rows in each part (Parquet: "
    "row_group_size, Arrow: rows of a record batch), or as .jsonl"
)


def main() -> None:
    """Read what is asked for and write the rows' frames."""
    require_pyarrow()
    import numpy  # noqa: F401
    from pyarrow import compute, parquet  # noqa: F401

    asked = json.load(sys.stdin.buffer)
    files, columns = [Path(file) for file in asked["files"]], Columns(**asked["columns"])
    numbers = {file: number for number, file in enumerate(files)}
    # What a library prints must not come between the frames.
    out = os.fdopen(os.dup(1), "wb", buffering=2**16)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # An Arrow file takes addresses but no memory: it is mapped.
    longest = max((file.stat().st_size for file in files if file.suffix == ".arrow" and file.is_file()), default=0)
    memory = MappedMemory()
    limit_data((memory.data_bytes() or 0) + MEMORY_BYTES)
    limit((memory.size_bytes() or 0) + longest + MEMORY_BYTES, processes=True)
    try:
        known: tuple[int, ...] = ()
        for read in text_rows(files, columns):
            place = numbers[read.row.file], read.row.number
            if (found := (len(columns.found), len(columns.names))) != known:
                known = found
                told = (columns.found, columns.passed_over, columns.names)
                _write(out, _COLUMNS, 0, 0, *(json.dumps(each).encode() for each in told))
            if read.texts:
                _write(out, _TEXTS, *place, *(text.encode() for text in read.texts), asked=read.asked)
            else:
                wrong = {"row": read.row.problem, "names": list(read.row.values)}
                _write(out, _WRONG, *place, json.dumps(wrong | {"lacking": read.lacking, "problems": read.problems}).encode())
        _write(out, _END)
    except MemoryError:
        _write(out, _TOO_LARGE)
    out.close()


def _write(out: IO[bytes], kind: bytes, file: int = 0, number: int = 0, *contents: bytes, asked: tuple[int, int] = (0, 0)) -> None:
    contents += (b"",) * (3 - len(contents))
    out.write(_FRAME.pack(kind, file, number, *asked, *map(len, contents)) + b"".join(contents))


def _exactly(frames: IO[bytes], size: int) -> bytes:
    content = frames.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _all_of(files: Sequence[Path]) -> Path:
    return files[0] if len(files) == 1 else files[0].parent

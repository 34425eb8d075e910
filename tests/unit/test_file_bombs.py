"""A small file that holds far more than it is long costs no more memory than its rows may have."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from shared.config import TaskSpec
from shared.tasks.file_source import FileSourceError, load_rows

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
from pyarrow import parquet  # noqa: E402

ROOT = Path(__file__).parents[2]
READ = """
import re, resource, sys
from pathlib import Path
from shared.config import TaskSpec
from shared.tasks.file_source import FileSourceError, load_rows
def most_kb():  # not ru_maxrss, in which the kernel counts what the parent had
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = most_kb()
try:
    load_rows(TaskSpec(source="file", path=sys.argv[1]))
except FileSourceError as error:
    print(error)
print(max(most_kb() - before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024)
"""

pytestmark = pytest.mark.slow


def repeated(file: Path, text: str, rows: int, *, first: int = 0) -> Path:
    """A Parquet file of `rows` questions, which are all `text` from the row `first` on."""
    questions = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * first + [1] * (rows - first), pyarrow.int32()), ["q", text])
    table = pyarrow.table({"question": questions, "answer": pyarrow.array(["1"] * rows)})
    parquet.write_table(table, file, compression="zstd", store_schema=False)
    return file


def test_a_long_text_that_is_repeated_is_refused_within_a_limit_of_memory(tmp_path: Path) -> None:
    file = repeated(tmp_path / "rows.parquet", "a" * (8 << 20), 200)
    assert file.stat().st_size < 10_000  # and 1.6 GB of text
    done = subprocess.run([sys.executable, "-c", READ, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=180)
    error, peak_mb = done.stdout.splitlines()
    assert "within 768 MiB of memory" in error and int(peak_mb) < 900, done


def test_the_row_that_is_too_long_is_named_wherever_it_is(tmp_path: Path) -> None:
    file = repeated(tmp_path / "rows.parquet", "a" * (2 << 20), 700, first=600)
    with pytest.raises(FileSourceError, match="row 601: column 'question': has 2,097,152 characters"):
        load_rows(TaskSpec(source="file", path=str(file)))


def test_texts_that_are_repeated_are_read_as_they_are(tmp_path: Path) -> None:
    rows = load_rows(TaskSpec(source="file", path=str(repeated(tmp_path / "rows.parquet", "ü" * 1000, 700, first=3))))
    assert [rows.row(place)[0] for place in (0, 2, 3, 699)] == ["q", "q", "ü" * 1000, "ü" * 1000] and len(rows) == 700


@cache
def compressed_texts() -> bytes:
    table = pyarrow.table({"question": ["a" * (4 << 20)] * 250, "answer": ["1"] * 250})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    out = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(out, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(out.getvalue())


def arrow_of_compressed_texts(file: Path) -> Path:
    """250 texts of 4 MiB in one record batch, whose buffers are compressed."""
    file.write_bytes(compressed_texts())
    return file


def parquet_of_plain_texts(file: Path) -> Path:
    """A page of 800 MB in Parquet without a dictionary."""
    table = pyarrow.table({"question": ["a" * (400 << 20)] * 2, "answer": ["1"] * 2})
    parquet.write_table(table, file, compression="zstd", use_dictionary=False, store_schema=False, write_statistics=False)
    return file


def json_of_one_line(file: Path) -> Path:
    """A line of 700 MB, which takes no room on disk."""
    with file.open("wb") as out:
        out.truncate(700 << 20)
    return file


def folder_of_a_long_file_and_a_bomb(folder: Path) -> Path:
    """The first file is mapped, and takes as many addresses as it is long."""
    folder.mkdir()
    table = pyarrow.table({"question": ["q"], "answer": ["1"]})
    with pyarrow.OSFile(str(folder / "part-0.arrow"), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    os.truncate(folder / "part-0.arrow", 1_500 << 20)
    arrow_of_compressed_texts(folder / "part-1.arrow")
    return folder


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (arrow_of_compressed_texts, "rows.arrow", "within 768 MiB of memory"),
        (parquet_of_plain_texts, "rows.parquet", "within 768 MiB of memory"),
        (folder_of_a_long_file_and_a_bomb, "rows", "within 768 MiB of memory"),
        (json_of_one_line, "rows.jsonl", "line 1: longer than 16,777,216 bytes"),
    ],
)
def test_what_unfolds_to_gigabytes_is_refused_within_a_limit_of_memory(
    tmp_path: Path, make: Callable[[Path], Path], name: str, said: str
) -> None:
    file = make(tmp_path / name)
    assert file.stat().st_blocks * 512 < 1_000_000
    done = subprocess.run([sys.executable, "-c", READ, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=180)
    error, peak_mb = done.stdout.splitlines()
    assert said in error and str(file) in error and int(peak_mb) < 900, done


def test_long_texts_that_fit_into_messages_are_read_from_one_row_group(tmp_path: Path) -> None:
    text = "".join(random.Random(1).choices("abcdefghijklmnop ", k=260_000))
    table = pyarrow.table({"question": [f"{row} {text}" for row in range(280)], "answer": ["1"] * 280})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert len(load_rows(TaskSpec(source="file", path=str(tmp_path / "rows.parquet")))) == 280


def test_many_different_texts_of_one_row_group_are_read_once_each_and_in_order(tmp_path: Path) -> None:
    """The first ones are read as what is different and where it is, the others as they are."""
    count = 30_000
    table = pyarrow.table(
        {"question": [f"{row} " + "q" * (row % 900) for row in range(count)], "answer": [str(row % 7) for row in range(count)]}
    )
    parquet.write_table(table, tmp_path / "rows.parquet", dictionary_pagesize_limit=2**30)
    rows = load_rows(TaskSpec(source="file", path=str(tmp_path / "rows.parquet")))
    assert len(rows) == count
    read = [rows.row(row) for row in range(count)]
    assert read == list(zip(table["question"].to_pylist(), table["answer"].to_pylist(), strict=True))

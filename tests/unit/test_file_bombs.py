"""A small file that holds far more than it is long costs no more memory than its rows may have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.config import TaskSpec
from shared.tasks.file_source import FileSourceError, load_rows

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
from pyarrow import parquet  # noqa: E402

ROOT = Path(__file__).parents[2]
READ = """
import resource, sys
from shared.config import TaskSpec
from shared.tasks.file_source import FileSourceError, load_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_rows(TaskSpec(source="file", path=sys.argv[1]))
except FileSourceError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def repeated(file: Path, text: str, rows: int, *, first: int = 0) -> Path:
    """A Parquet file of `rows` questions, which are all `text` from the row `first` on."""
    questions = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * first + [1] * (rows - first), pyarrow.int32()), ["q", text])
    table = pyarrow.table({"question": questions, "answer": pyarrow.array(["1"] * rows)})
    parquet.write_table(table, file, compression="zstd", store_schema=False)
    return file


def test_a_long_text_that_is_repeated_is_refused_before_it_is_unfolded(tmp_path: Path) -> None:
    file = repeated(tmp_path / "rows.parquet", "a" * (8 << 20), 200)
    assert file.stat().st_size < 10_000  # and 1.6 GB of text
    done = subprocess.run([sys.executable, "-c", READ, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=180)
    error, *_, more, peak_mb = done.stdout.splitlines()
    assert "row 1: column 'question': longer than" in error and more == "and 190 more" and int(peak_mb) < 400, done


def test_the_row_that_is_too_long_is_named_wherever_it_is(tmp_path: Path) -> None:
    file = repeated(tmp_path / "rows.parquet", "a" * (2 << 20), 700, first=600)
    with pytest.raises(FileSourceError, match="row 601: column 'question': longer than"):
        load_rows(TaskSpec(source="file", path=str(file)))


def test_texts_that_are_repeated_are_read_as_they_are(tmp_path: Path) -> None:
    rows = load_rows(TaskSpec(source="file", path=str(repeated(tmp_path / "rows.parquet", "ü" * 1000, 700, first=3))))
    assert [rows.row(place)[0] for place in (0, 2, 3, 699)] == ["q", "q", "ü" * 1000, "ü" * 1000] and len(rows) == 700

"""Values of Parquet and Arrow files are the texts that they are in JSON lines, and what hinders
reading them is told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.config import TaskSpec
from shared.tasks import subprocess_reader
from shared.tasks.file_formats import FileSourceError
from shared.tasks.file_rows import FileRows
from shared.tasks.file_source import load_rows

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
from pyarrow import parquet  # noqa: E402

pytestmark = pytest.mark.slow

NUMBERS = {
    "float": [0.1, 3.0, -0.5, 123456792.0, 16777216.0, 1e-7, 2.0**70],
    "halffloat": [0.1, 3.0, -0.5, 2050.0, 65504.0],
    "double": [0.1, 3.0, -0.5, 123456792.0, 1e-7, 1e22],
}
TEXTS = {
    "float": ["0.1", "3", "-0.5", "123456792", "16777216", "0.0000001", str(2**70)],
    "halffloat": ["0.1", "3", "-0.5", "2050", "65504"],
    "double": ["0.1", "3", "-0.5", "123456792", "0.0000001", str(10**22)],
}


def as_parquet(folder: Path, table: Any) -> Path:
    parquet.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def as_arrow(folder: Path, table: Any) -> Path:
    with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "rows.arrow"


def rows_of(file: Path) -> FileRows:
    return load_rows(TaskSpec(source="file", path=str(file)))


def plain(numbers: Any) -> Any:
    return numbers


def folded(numbers: Any) -> Any:
    """As pandas writes a column of categories: each different number once, and where it is."""
    places = pyarrow.array([*range(len(numbers))], pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(places, numbers)


@pytest.mark.parametrize("stored", [plain, folded])
@pytest.mark.parametrize("write", [as_parquet, as_arrow])
@pytest.mark.parametrize("kind", [*NUMBERS])
def test_numbers_of_every_width_are_the_digits_that_were_meant(
    tmp_path: Path, kind: str, write: Callable[[Path, Any], Path], stored: Callable[[Any], Any]
) -> None:
    numbers = pyarrow.array(NUMBERS[kind], pyarrow.type_for_alias(kind))
    questions = [f"q{place}" for place in range(len(numbers))]
    rows = rows_of(write(tmp_path, pyarrow.table({"question": questions, "answer": stored(numbers)})))
    assert [rows.row(place)[1] for place in range(len(rows))] == TEXTS[kind]
    lines = (f'{{"question": "q{place}", "answer": {digits}}}\n' for place, digits in enumerate(TEXTS[kind]))
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    assert rows_of(tmp_path / "rows.jsonl").name == rows.name


@pytest.mark.parametrize("write", [as_parquet, as_arrow])
def test_a_column_that_is_there_twice_is_refused_by_name_unless_it_is_not_read(
    tmp_path: Path, write: Callable[[Path, Any], Path]
) -> None:
    columns = [["q"], ["1"], ["2"]]
    file = write(tmp_path, pyarrow.table(columns, names=["question", "answer", "answer"]))
    with pytest.raises(FileSourceError) as caught:
        rows_of(file)
    assert str(caught.value) == f"{file}: it has several columns 'answer': rename or remove all but one"
    file = write(tmp_path, pyarrow.table(columns, names=["question", "id", "id"]))
    with pytest.raises(FileSourceError, match=r"no column 'answer' \(nor .*\); its columns are id, question"):
        rows_of(file)
    file = write(tmp_path, pyarrow.table([*columns, ["3"]], names=["question", "answer", "id", "id"]))
    assert rows_of(file).row(0) == ("q", "1")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise KeyError('answer')", "ended with code 1 (KeyError: 'answer')"),
        ("import os; os._exit(3)", "ended with code 3 (without a word)"),
        ("import os; os.kill(os.getpid(), 15)", "was killed by SIGTERM, perhaps for lack of memory"),
        ("import sys, time; sys.stdin.read(); print('x' * 99, flush=True); time.sleep(60)", "does not answer as it should"),
    ],
)
def test_how_the_process_that_reads_a_file_ended_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setattr(subprocess_reader, "_START", code)
    monkeypatch.setattr(subprocess_reader, "_GONE_S", 1.0)
    with pytest.raises(FileSourceError) as caught:
        rows_of(as_parquet(tmp_path, pyarrow.table({"question": ["q"], "answer": ["1"]})))
    assert f"rows.parquet: the process that read it {said}: write it as .jsonl" in str(caught.value)

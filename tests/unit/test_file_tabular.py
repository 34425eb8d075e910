"""Values of Parquet and Arrow files are the texts that they are in JSON lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.config import TaskSpec
from shared.tasks.file_rows import FileRows
from shared.tasks.file_source import load_rows

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
from pyarrow import parquet  # noqa: E402

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

"""A number in a file of JSON lines keeps every digit that was written, and is the same text as in
Parquet.
"""

from __future__ import annotations

import time
import tracemalloc
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import TaskSpec
from shared.tasks.file_columns import as_text
from shared.tasks.file_formats import FileSourceError, exact_number
from shared.tasks.file_rows import FileRows
from shared.tasks.file_source import load_rows


def rows_with(folder: Path, literal: str, column: str = "answer") -> FileRows:
    file = folder / "rows.jsonl"
    values = {"question": '"How many?"', "answer": "1", column: literal}
    file.write_text("{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}\n")
    return load_rows(TaskSpec(source="file", path=str(file)))


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        ("3.14159265358979323846", "3.14159265358979323846"),
        ("3.14159265358979311600", "3.141592653589793116"),
        ("12345678901234567891.0", "12345678901234567891"),
        ("1.2345678901234567891E19", "12345678901234567891"),
        ("1e-400", "0." + 399 * "0" + "1"),
        ("-1e-400", "-0." + 399 * "0" + "1"),
        ("0.10000000000000001", "0.10000000000000001"),
        # As before: what a double says in its shortest digits, however it is written.
        ("3.141592653589793", "3.141592653589793"),
        ("3.1415926535897930000000000", "3.141592653589793"),
        ("12345678901234567000.0", "12345678901234567000"),
        ("1e22", "1" + 22 * "0"),
        ("1E+2", "100"),
        ("5e-324", "0." + 323 * "0" + "5"),
        ("-0.0", "0"),
    ],
)
def test_no_digit_of_a_number_is_lost(tmp_path: Path, literal: str, text: str) -> None:
    assert rows_with(tmp_path, literal).row(0) == ("How many?", text)


def test_numbers_that_differ_in_a_digit_that_a_double_loses_are_different_datasets(tmp_path: Path) -> None:
    names = {rows_with(tmp_path, f"3.141592653589793{digits}").name for digits in ("", "11600", "23846")}
    assert len(names) == 3


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_double_has_the_text_of_its_shortest_digits(number: float) -> None:
    assert as_text(exact_number(repr(number))) == as_text(number)
    assert as_text(exact_number(f"{Decimal(repr(number)):.400f}")) == as_text(number)


@given(st.builds("{}.{}e{}".format, st.integers(-(10**30), 10**30), st.text("0123456789", min_size=1), st.integers(-99, 99)))
def test_a_literal_has_the_text_of_the_same_decimal(literal: str) -> None:
    assert as_text(exact_number(literal)) == as_text(Decimal(literal))


@pytest.mark.slow
def test_a_decimal_of_parquet_is_the_same_number(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    from pyarrow import parquet

    for literal in ("3.14159265358979323846", "3.14159265358979311600", "2.50000000000000000000"):
        table = pyarrow.table({"question": ["How many?"], "answer": pyarrow.array([Decimal(literal)])})
        parquet.write_table(table, tmp_path / "rows.parquet")
        stored = load_rows(TaskSpec(source="file", path=str(tmp_path / "rows.parquet")))
        assert stored.name == rows_with(tmp_path, literal).name, literal


@pytest.mark.parametrize("column", ["answer", "question", "other"])
@pytest.mark.parametrize(
    ("literal", "said"),
    [
        ("1e999999999", "has more than 4,300 digits"),
        ("1e99999999999999999999", "has more than 4,300 digits"),
        ("1e-999999999", "has more than 4,300 digits when written without exponent: shorten it, or write it as text"),
        ("1e-99999999999999999999", "has more than 4,300 digits"),
        ("0." + 1_000_000 * "3", "has more than 4,300 digits"),
        (1_000_000 * "9" + ".5", "has more than 4,300 digits"),
    ],
    ids=lambda given: given[:12],
)
def test_a_number_of_many_digits_is_refused_in_a_sentence_and_takes_neither_memory_nor_time(
    tmp_path: Path, literal: str, said: str, column: str
) -> None:
    if column == "other":
        assert rows_with(tmp_path, literal, column).row(0) == ("How many?", "1"), "a column that is not read may hold anything"
        return
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(FileSourceError) as caught:
            rows_with(tmp_path, literal, column)
        assert time.process_time() - started < 5
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
    assert f"line 1: column {column!r}: {said}" in str(caught.value)
    assert len(str(caught.value)) < 500

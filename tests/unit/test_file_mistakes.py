"""Every mistake of a user's own file is told at once: by row and column, the first ten in words."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shared.config import TaskSpec, load_config
from shared.tasks import TaskConfigError, check_specs
from shared.tasks.file_source import MOST_FOUND, FileSourceError, load_rows
from shared.tasks.specs import checked_config, source_problems


def written(file: Path, *lines: str | bytes | dict[str, Any]) -> Path:
    """A file of these lines; an object is one as JSON."""
    parts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    file.write_bytes(b"".join((part.encode() if isinstance(part, str) else part) + b"\n" for part in parts))
    return file


def good(number: int) -> dict[str, Any]:
    return {"question": f"What is {number} + 0?", "answer": number}


def refused(file: Path, **settings: Any) -> list[str]:
    """The lines of the refusal, without the path."""
    with pytest.raises(FileSourceError) as caught:
        load_rows(TaskSpec(source="file", path=str(file), **settings))
    return [line.removeprefix(f"{file}: ") for line in str(caught.value).splitlines()]


BAD = [
    good(1),
    "not JSON at all",
    {"question": "q", "answer": None},
    "",
    {"question": "q", "anwser": 4},
    "[1, 2]",
    {"question": " ", "answer": [1]},
    b'{"question": "\xe9", "answer": 1}',
    {**good(1), "answer": 5},
]
BEGIN = [
    "line 2: not JSON",
    "line 3: column 'answer': has no value",
    "line 5: this row has no 'answer', only anwser, question (did you mean anwser?): give it one",
    "line 6: not a JSON object",
    "line 7: column 'question': is empty",
    "line 7: column 'answer': consists of several values",
    "line 8: not UTF-8",
    "line 9: the same question as in line 1, 'What is 1 + 0?', and another answer, '5' and not '1'",
]


def test_every_mistake_of_a_file_is_told_with_line_and_column(tmp_path: Path) -> None:
    told = refused(written(tmp_path / "rows.jsonl", *BAD))
    assert len(told) == len(BEGIN) and all(line.startswith(begin) for line, begin in zip(told, BEGIN, strict=True)), told


def test_the_first_ten_are_told_and_the_others_counted(tmp_path: Path) -> None:
    told = refused(written(tmp_path / "rows.jsonl", *(good(number) if number % 2 else "{" for number in range(1, 51))))
    assert [line.split(":")[0] for line in told] == [*(f"line {2 * number}" for number in range(1, 11)), "and 15 more"]


def test_the_column_of_another_setting_is_not_suggested(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", {"solutions": "4", "solution": 4})
    (line,) = refused(rows, question="solutio", answer="solution")
    assert "did you mean solutions?" in line


def test_one_row_without_the_column_is_a_bad_row_and_a_file_without_it_has_no_such_column(tmp_path: Path) -> None:
    (row,) = refused(written(tmp_path / "row.jsonl", good(1), {"question": "q"}, good(2)))
    assert row.startswith("line 2: this row has no 'answer', only question") and "--columns" not in row
    told = refused(written(tmp_path / "all.jsonl", *({"text": f"q{n}", "anwser": n, "id": n} for n in range(30))))
    assert told == [
        "there is no column 'question' (nor prompt, problem, messages); its columns are anwser, id, text; set `question` "
        "(`swarm new`: --question; `swarm task`: --columns) to the questions' column",
        "there is no column 'answer' (nor ground_truth, final_answer, solution, reward_model.ground_truth); its columns are "
        "anwser, id, text (did you mean anwser?); set `answer` (`swarm new`: --answer; "
        "`swarm task`: --columns) to the answers' column",
    ]
    told = refused(written(tmp_path / "one.jsonl", {"text": "q", "answer": 1}, {"text": "r", "answer": None}))
    assert len(told) == 2 and told[1].startswith("line 2: column 'answer': has no value"), "the other column is looked at too"


def test_names_of_columns_from_a_foreign_file_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    said = refused(written(tmp_path / "rows.jsonl", {"answr\n\x1b[2J": 1, "x" * 5000: 2}))
    assert len(said) == 2 and "\x1b" not in said[1] and "answr\\n\\x1b[2J" in said[1] and "x" * 100 not in said[1]


@pytest.mark.slow
def test_parquet_and_folders_tell_all_rows_and_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    from pyarrow import parquet

    long = "a" * (2 << 20)
    table = pyarrow.table({"question": ["q", None, long, " ", "r"], "answer": ["1", "2", "3", "4", None]})
    parquet.write_table(table, tmp_path / "part-0.parquet")
    told = refused(tmp_path / "part-0.parquet")
    assert [line.split(" (")[0].split(" and ")[0] for line in told] == [
        "row 2: column 'question': has no value",
        "row 3: column 'question': has 2,097,152 characters, but a message can hold at most 262,144: shorten it",
        "row 4: column 'question': is empty: give it a text or remove the row",
        "row 5: column 'answer': has no value",
    ]
    parquet.write_table(table.rename_columns(["question", "answr"]).slice(0, 1), tmp_path / "part-1.parquet")
    (tmp_path / "part-2.parquet").write_text("no table")
    told = refused(tmp_path)
    assert len(told) == 6
    absent = "there is no column 'answer'; its columns are answr, question (did you mean answr?)"
    assert told[4].startswith(f"{tmp_path}/part-1.parquet: {absent}")
    assert told[5].startswith(f"{tmp_path}/part-2.parquet: cannot be read as parquet")
    halves = [pyarrow.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0])), pyarrow.py_buffer(b"\xff\xfeok")]
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, *halves])
    (tmp_path / "folder").mkdir()
    table = pyarrow.table({"question": bad, "answer": pyarrow.array([1.5, None], pyarrow.float32())})
    with pyarrow.OSFile(str(tmp_path / "folder" / "x.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    told = refused(tmp_path / "folder")
    assert [line.split("/")[-1].split(" (")[0] for line in told] == [
        "x.arrow: row 1: column 'question': its string cannot be read",
        "x.arrow: row 2: column 'answer': has no value",
    ]


def test_bad_rows_hide_neither_the_verifiers_refusals_nor_too_few_questions_nor_other_sources(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", good(1), "{", {"question": "q", "answer": "four"}, {"question": "r", "answer": "five"})
    tasks = [{"source": "file", "path": str(file), "verifier": "final_number"}, {"dataset": "gdc"}]
    config = load_config(None, {"tasks": tasks, "eval": {"tasks": 40}})
    with pytest.raises(TaskConfigError) as caught:
        checked_config(config)  # as generator and verifier do when they start
    told = str(caught.value).splitlines()[1:]
    path = f"  [[tasks]] 1: {file}: "
    assert [line[: len(path) + 6] for line in told[:4]] == [path + each for each in ("line 2", "2 of i", "lines ", "it has")], told
    assert "lines 3, 4: " in told[2] and "gives 'four'" in told[2]
    assert "it has 4 different questions" in told[3], "the bad row may be a question yet"
    assert told[4].startswith("  [[tasks]] 2: gdc: neither") and len(told) == 5
    assert [f"  {line}" for line in source_problems(config.tasks, config.eval.tasks)] == told


def test_answers_that_the_verifier_cannot_judge_are_told_by_the_lines_of_the_file(tmp_path: Path) -> None:
    rows = [{"question": f"q{number}", "answer": "four" if number > 20 else number} for number in range(50)]
    spec = TaskSpec(source="file", path=str(written(tmp_path / "rows.jsonl", "", *rows)), verifier="final_number")
    with pytest.raises(TaskConfigError) as caught:
        check_specs([spec])
    told = str(caught.value).splitlines()[1:]
    assert len(told) == 2 and "29 of its 50 rows" in told[0] and "rows.jsonl: lines 23, 24, 25, 26, 27 and 24 more: " in told[1]


PACKED = [
    (gzip.compress(b"{}", mtime=0), "gzip", "gunzip"),
    (bz2.compress(b"{}"), "bzip2", "bunzip2"),
    (lzma.compress(b"{}"), "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd\x20\x02", "zstd", "unzstd"),
    (b"PK\x03\x04\x14\x00", "zip", "unzip"),
    (b"PAR1\x15\x04", "Parquet", ".parquet"),
    (b"ARROW1\x00\x00", "Arrow", ".arrow"),
    ('{"question": "q", "answer": 1}'.encode("utf-16"), "UTF-16", "UTF-8"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS", "git lfs pull"),
]


@pytest.mark.parametrize(("content", "kind", "remedy"), PACKED)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_file_of_another_kind_is_told_as_what_it_is_with_the_remedy(
    tmp_path: Path, content: bytes, kind: str, remedy: str, name: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (line,) = refused(tmp_path / name)
    assert kind in line and remedy in line


def test_a_key_that_stands_twice_in_a_row_is_a_mistake_and_one_inside_another_column_is_none(tmp_path: Path) -> None:
    twice = '{"question": "a", "answer": 1, "answer": 2}'
    inside = '{"question": "b", "answer": 1, "notes": {"x": 1, "x": 2}}'
    (line,) = refused(written(tmp_path / "rows.jsonl", twice, inside))
    assert line.startswith("line 1: the key 'answer' stands twice")


def test_a_foreign_file_is_told_without_reading_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "table.jsonl"
    file.write_bytes(b"question,answer\n" * 3_000_000)
    began = time.process_time()
    first, *_, last = refused(file)
    assert first.startswith("line 1: not JSON") and last == f"and at least {MOST_FOUND - 10:,} more"
    assert time.process_time() - began < 10, "of the whole file it takes far longer"
    half = refused(written(tmp_path / "half.jsonl", *([good(0)] + ["{"] * 3000)))
    assert half[-1] == f"and at least {MOST_FOUND - 10:,} more"


@pytest.mark.slow
def test_a_line_without_end_and_names_without_number_take_neither_time_nor_memory(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    with file.open("wb") as out:
        out.write(b'{"a": [')
        for _ in range(40):
            out.write(b"{}," * 400_000)
        many_names = {f"answer{n}": n for n in range(300_000)}
        out.write(b"".join(b"\n" + json.dumps(row).encode() for row in (many_names, good(1))))
    code = (
        "import resource, sys\nfrom shared.config import TaskSpec\n"
        "from shared.tasks.file_source import FileSourceError, load_rows\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    load_rows(TaskSpec(source='file', path=sys.argv[1]))\nexcept FileSourceError as error:\n    print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=240, check=True, env=dict(os.environ)
    )
    *told, peak_mb = done.stdout.splitlines()
    assert "line 1: longer than 16,777,216 bytes" in told[-1] and len(told) == 3 and len(done.stdout) < 3000, done.stdout[:3000]
    assert int(peak_mb) < 300


@pytest.mark.slow
def test_task_show_says_every_mistake_of_the_file_and_nothing_of_entries_that_there_are_not(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", *BAD)
    done = subprocess.run(
        [sys.executable, "-m", "swarm_cli", "task", "show", str(file)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 1 and "[[tasks]]" not in done.stderr
    assert all(f"{file}: {begin}" in done.stderr for begin in BEGIN), done.stderr

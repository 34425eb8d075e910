"""Rows in the shapes in which people publish and keep them are read as they are: usual names of
columns, paths into objects, questions made of columns, JSON lists and CSV.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.config import TaskSpec, scorers_id
from shared.contracts.messages import TaskRef, user_prompt
from shared.tasks import HeldOut, derive_task, held_out_tasks
from shared.tasks.file_formats import FileSourceError, data_files
from shared.tasks.file_rows import FileRows
from shared.tasks.file_source import load_rows, with_row_name
from shared.tasks.held_out import held_out_id
from shared.tasks.specs import check_specs

USER = "Find the number of edges of a cube."
SHAPES: dict[str, tuple[list[dict[str, Any]], dict[str, str], list[tuple[str, str]]]] = {
    "gsm8k": (
        [{"question": "Mia has 3 bags of 4 nuts. How many nuts?", "answer": "Mia has 3*4=<<3*4=12>>12 nuts.\n#### 12"}],
        {},
        [("Mia has 3 bags of 4 nuts. How many nuts?", "Mia has 3*4=<<3*4=12>>12 nuts.\n#### 12")],
    ),
    "hendrycks_math": (
        [{"problem": "Find $2+2$.", "level": "Level 1", "type": "Algebra", "solution": r"Adding gives $\boxed{4}$."}],
        {},
        [("Find $2+2$.", r"Adding gives $\boxed{4}$.")],
    ),
    "math_500": (
        [{"problem": "p", "solution": r"So $\boxed{\frac{1}{2}}$.", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 2}],
        {},
        [("p", r"\frac{1}{2}")],
    ),
    "deepscaler": ([{"problem": "p", "answer": "7", "solution": "long"}], {}, [("p", "7")]),
    "deepmath": ([{"question": "p", "final_answer": "0", "difficulty": 5.0, "topic": "t", "r1_solution_1": "s"}], {}, [("p", "0")]),
    "openr1_math": (
        [
            {
                "problem": "p",
                "solution": "s",
                "answer": "9",
                "uuid": "u",
                "generations": ["a", "b"],
                "correctness_math_verify": [True, False],
                "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}],
            }
        ],
        {},
        [("p", "9")],
    ),
    "countdown": (
        [{"nums": [44, 19, 35], "target": 98}, {"nums": [1, 2], "target": 3}],
        {"question": "Use {nums} to make {target}, as {{a+b}}.", "answer": "target"},
        [("Use [44, 19, 35] to make 98, as {a+b}.", "98"), ("Use [1, 2] to make 3, as {a+b}.", "3")],
    ),
    "verl": (
        [
            {
                "data_source": "d",
                "prompt": [{"role": "user", "content": USER}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "12"},
                "extra_info": {"split": "train", "index": 0},
            }
        ],
        {},
        [(USER, "12")],
    ),
    "trl": ([{"prompt": "p", "ground_truth": 5, "id": 1}], {}, [("p", "5")]),
}


def written(file: Path, text: str | bytes) -> Path:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def read(file: Path, **settings: str) -> FileRows:
    return load_rows(TaskSpec(source="file", path=str(file), **settings))  # type: ignore[arg-type]


def texts(rows: FileRows) -> list[tuple[str, str]]:
    return [rows.row(index) for index in range(len(rows))]


def refused(file: Path, **settings: str) -> list[str]:
    with pytest.raises(FileSourceError) as caught:
        read(file, **settings)
    return [line.removeprefix(f"{file}: ") for line in str(caught.value).splitlines()]


def as_lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return written(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def as_list(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return written(folder / "rows.json", json.dumps(rows, indent=2))


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def as_arrow(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    table = pyarrow.Table.from_pylist(rows)
    (folder / "saved").mkdir()
    file = folder / "saved" / "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    written(folder / "saved" / "state.json", json.dumps({"_data_files": [{"filename": file.name}]}))
    written(folder / "saved" / "dataset_info.json", "{}")
    return folder / "saved"


@pytest.mark.slow
@pytest.mark.parametrize("write", [as_lines, as_list, as_parquet, as_arrow])
def test_published_rows_are_read_without_conversion_in_every_format(
    tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    for name, (rows, settings, wanted) in SHAPES.items():
        (folder := tmp_path / name).mkdir()
        assert texts(read(write(folder, rows), **settings)) == wanted, name


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "trl"])
def test_published_rows_can_be_trained_on_with_the_verifier_math(tmp_path: Path, name: str) -> None:
    rows, settings, _ = SHAPES[name]
    spec = TaskSpec(source="file", path=str(as_lines(tmp_path, rows)), verifier="math", **settings)  # type: ignore[arg-type]
    assert len(check_specs([spec])) == 1


def test_of_several_usual_names_the_first_is_taken_for_all_rows_and_told(tmp_path: Path) -> None:
    rows = read(as_lines(tmp_path, SHAPES["math_500"][0]))
    assert "'answer'" in rows.note and "'solution'" in rows.note and "'problem'" in rows.note
    assert read(as_lines(tmp_path, SHAPES["gsm8k"][0])).note == ""
    mixed = [{"prompt": "a", "answer": 1}, {"question": "b", "solution": 2}, {"prompt": "c", "answer": 3}]
    told = refused(as_lines(tmp_path, mixed))
    assert [line[:33] for line in told] == ["line 2: this row has no 'prompt',", "line 2: this row has no 'answer',"]
    late = [{"prompt": "a"}, {"prompt": "b", "solution": 2}]
    (line,) = refused(as_lines(tmp_path, late))
    assert line.startswith("there is no column 'answer'") and "its columns are prompt" in line


def test_messages_are_found_and_inserted_as_their_texts_and_are_the_same_question(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": USER}]
    file = as_lines(tmp_path, [{"messages": asked, "answer": "12"}])
    plain, made = read(file), read(file, question="Question: {messages}\nAnswer:")
    assert texts(plain)[0][0].startswith("\0system\0")
    assert texts(made) == [(f"Question: Be brief.\n\n{USER}\nAnswer:", "12")]
    assert plain.asked(0) == made.asked(0)
    ended = [*asked, {"role": "assistant", "content": "12"}]
    (line,) = refused(as_lines(tmp_path, [{"messages": ended, "answer": "12"}]), question="{messages}!")
    assert "{messages} ends with a message of the role assistant" in line


def test_the_columns_in_an_error_are_whole_or_counted(tmp_path: Path) -> None:
    names = [f"a_column_with_a_long_name_{number:02d}" for number in range(60)]
    told = refused(as_lines(tmp_path, [dict.fromkeys(names, "x")]))[0]
    assert all(name in told for name in names[:40]) and "_39 and 20 more" in told
    few = refused(as_lines(tmp_path, [dict.fromkeys(names[:12], "x")]))[0]
    assert all(name in few for name in names[:12]) and "more" not in few


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("Use {numbers} to make {target}", "there is no column 'numbers'; its columns are nums, target (did you mean nums?)"),
        ("Use {nums} to make {target", "question = 'Use {nums} to make {target': "),
        ("Use {} to make {target}", "braces hold the name of a column alone"),
        ("Use {target:.2f}", "braces hold the name of a column alone"),
        ("Write {{}} only", "it names no column"),
        ("Use {nums} and {inner}", "line 1: `question`: {inner} consists of several values"),
    ],
)
def test_a_question_of_columns_that_cannot_be_made_is_refused(tmp_path: Path, question: str, said: str) -> None:
    row: dict[str, Any] = {"nums": [1, 2], "target": 3} | ({"inner": {"a": 1}} if "inner" in question else {})
    told = refused(as_lines(tmp_path, [row]), question=question, answer="target")
    assert len(told) == 1 and said in told[0]


SYSTEM = {"role": "system", "content": "Think first."}
ASKED = [SYSTEM, {"role": "user", "content": "2?"}, {"role": "assistant", "content": "3."}, {"role": "user", "content": "4?"}]


@pytest.mark.slow
@pytest.mark.parametrize("write", [as_lines, as_list, as_parquet])
def test_a_prompt_of_messages_is_asked_as_these_messages(
    tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    file = write(tmp_path, [{"prompt": ASKED, "answer": "5"}, {"prompt": [{"role": "user", "content": "6?"}], "answer": "7"}])
    (spec,) = check_specs([TaskSpec(source="file", path=str(file))])
    several, one = (derive_task(TaskRef(dataset=spec.dataset, seed=0, index=index)) for index in (0, 1))
    assert [{"role": message.role, "content": message.text} for message in several.prompt] == ASKED
    assert several.text.startswith("system: Think first.") and several.answer == "5"
    assert one.prompt == user_prompt("6?") and one.text == "6?"
    spec = with_row_name(TaskSpec(source="file", path=str(as_lines(tmp_path, [{"question": "6?", "answer": 7}]))))
    assert derive_task(TaskRef(dataset=spec.dataset, seed=0, index=0)).key == one.key


def test_prompts_that_differ_in_a_message_are_other_questions_and_equal_ones_have_one_answer(tmp_path: Path) -> None:
    rows = [{"prompt": ASKED[:2], "answer": 1}, {"prompt": [{**SYSTEM, "content": "Be brief."}, ASKED[1]], "answer": 2}]
    assert read(as_lines(tmp_path, rows)).distinct_questions() == 2
    (line,) = refused(as_lines(tmp_path, [*rows, {"prompt": ASKED[:2], "answer": 3}]))
    assert line.startswith("line 3: the same question as in line 1, ") and "\\x00" not in line


FORMS: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "plain": ([{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(12)], {}),
    "template": ([{"text": f"What  is {n} + 1?", "a": n + 1} for n in range(12)], {"question": "Q: {text}\nA:", "answer": "a"}),
    "system": (
        [
            {"prompt": [SYSTEM, {"role": "user", "content": f"What is {n} + 1?"}], "answer": f"{n} and 1\n#### {n + 1}"}
            for n in range(12)
        ],
        {},
    ),
    "message": ([{"prompt": [{"role": "user", "content": f"what is {n} + 1?"}], "solution": f"${n + 1}$."} for n in range(12)], {}),
    "nested": ([{"row": {"problem": f"What is {n} + 1?"}, "answer": n + 1} for n in range(12)], {"question": "row.problem"}),
}


def source(
    folder: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], Path], rows: list[dict[str, Any]], **columns: str
) -> TaskSpec:
    (folder / name).mkdir()
    return with_row_name(TaskSpec(source="file", path=str(write(folder / name, rows)), **columns))


def left(spec: TaskSpec, held: HeldOut) -> list[int]:
    """The rows that may be trained on."""
    size = len(load_rows(spec))
    return [index for index in range(size) if not held.contains(derive_task(TaskRef(dataset=spec.dataset, seed=0, index=index)))]


PAIRS = [(asked, trained, as_lines) for asked in FORMS for trained in FORMS]


@pytest.mark.parametrize(
    ("asked", "trained", "write"), [*PAIRS, pytest.param("template", "system", as_parquet, marks=pytest.mark.slow)]
)
def test_a_question_that_is_held_out_is_trained_on_in_no_other_form(
    tmp_path: Path, asked: str, trained: str, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    rows, columns = FORMS[asked]
    of_set = source(tmp_path, "asked", write, rows[:4], verifier="final_number", **columns)
    rows, columns = FORMS[trained]
    to_train_on = source(tmp_path, "trained", write, rows, verifier="final_number", **columns)
    held = HeldOut(held_out_tasks([of_set], 4))
    assert len(held.tasks) == 4 and left(to_train_on, held) == list(range(4, 12))


def test_columns_of_a_template_are_told_apart_and_their_order_in_it_is_its_form(tmp_path: Path) -> None:
    def of(name: str, question: str, pairs: list[tuple[int, int]]) -> TaskSpec:
        rows = [{"a": a, "b": b, "answer": abs(a - b)} for a, b in pairs]
        return source(tmp_path, name, as_lines, rows, question=question)

    held = HeldOut(held_out_tasks([of("asked", "{a} and {b}?", [(1, 2), (3, 4)])], 2))
    assert left(of("trained", "To {b} from {a}?", [(1, 2), (2, 1), (4, 3), (3, 4)]), held) == [1, 2]


def test_one_text_of_which_two_things_are_asked_is_two_questions(tmp_path: Path) -> None:
    words = ["swan", "otter", "newt"]
    backwards = [{"word": word, "answer": word[::-1]} for word in words]
    lengths = [{"word": word, "answer": len(word)} for word in words]
    held = HeldOut(held_out_tasks([source(tmp_path, "asked", as_lines, backwards, question="Spell {word} backwards.")], 3))
    assert left(source(tmp_path, "trained", as_lines, lengths, question="How long is {word}?"), held) == [0, 1, 2]


def test_a_system_message_is_the_form_of_a_question_unless_it_holds_what_is_asked_about(tmp_path: Path) -> None:
    def row(system: str, question: str, answer: str) -> dict[str, Any]:
        return {"prompt": [{"role": "system", "content": system}, {"role": "user", "content": question}], "answer": answer}

    twice = [row(system, f"{n} + 1?", str(n + 1)) for n in range(6) for system in ("Be brief.", "Think first.")]
    spec = source(tmp_path, "twice", as_lines, twice)
    assert load_rows(spec).distinct_questions() == 6
    held = HeldOut(held_out_tasks([spec], 1))
    assert len(left(spec, held)) == 10

    reviews = [row(f"Review {n}: {'good' if n % 2 else 'bad'}.", "Do they like it?", "yes" if n % 2 else "no") for n in range(12)]
    spec = source(tmp_path, "reviews", as_lines, reviews)
    assert load_rows(spec).distinct_questions() == 12
    held = HeldOut(held_out_tasks([spec], 4))
    assert len(left(spec, held)) == 8


def test_held_out_questions_are_the_same_whatever_columns_another_reward_gets(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def one(completions, answer):\n    return [1.0] * len(completions)\n"
        "def two(completions, answer, level):\n    return [1.0] * len(completions)\n"
    )
    file = as_lines(tmp_path, [{"question": f"q{n}", "answer": n, "level": n % 3} for n in range(9)])
    specs = [with_row_name(TaskSpec(path=str(file), reward=f"{tmp_path}/rewards.py:{name}")) for name in ("one", "two")]
    assert specs[0].dataset != specs[1].dataset and scorers_id(specs[:1]) != scorers_id(specs[1:])
    first, second = ([*held_out_tasks([spec], 4)] for spec in specs)
    assert held_out_id(first) == held_out_id(second) != held_out_id(held_out_tasks([specs[0]], 5))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}], "ends with a message of the role assistant"),
        ([{"role": "user", "content": [{"type": "image", "url": "u"}]}], "part of kind 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part of kind 'text'"),
        ([{"role": "critic", "content": "a"}], "role 'critic'"),
        ([{"from": "human", "value": "a"}], "role None"),
        ([SYSTEM, {"role": "user", "content": " "}], "is empty"),
        ([SYSTEM, {"role": "user", "content": "a\0user\0b"}], "zero byte"),
        ([{"role": "user", "content": "a"}] * 65, "at most 64"),
        ("\0user\0b", "zero byte"),
        (["a", "b"], "consists of several values"),
        ([], "its prompt is list"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_refused_by_line(tmp_path: Path, prompt: Any, said: str) -> None:
    rows = [{"prompt": "p", "answer": 1}, {"prompt": prompt, "answer": 2}]
    (line,) = refused(as_lines(tmp_path, rows))
    assert line.startswith("line 2: column 'prompt': ") and said in line


CSV = 'problem,answer,note\r\n"What is 1,000 + 1?",1001,\r\n"Say ""yes""\r\nor no",yes,"a\tb"\r\n\r\nlast,3,\n'
CSV_ROWS = [("What is 1,000 + 1?", "1001"), ('Say "yes"\r\nor no', "yes"), ("last", "3")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", CSV.encode()),
        ("rows.csv", b"\xef\xbb\xbf" + CSV.encode()),
        ("rows.csv", b'problem;answer\n"What is 1,000 + 1?";1001\n"Say ""yes""\r\nor no";yes\nlast;3\n'),
        ("rows.csv", b'problem\tanswer\nWhat is 1,000 + 1?\t1001\n"Say ""yes""\r\nor no"\tyes\nlast\t3'),
        ("rows.csv", b'\r\n\nproblem;answer\n"What is 1,000 + 1?";1001\n"Say ""yes""\r\nor no";yes\nlast;3\n'),
        ("rows.csv", b'\xef\xbb\xbfsep=;\r\nproblem;answer\n"What is 1,000 + 1?";1001\n"Say ""yes""\r\nor no";yes\nlast;3\n'),
        ("rows.csv", b'problem|answer\n"What is 1,000 + 1?"|1001\n"Say ""yes""\r\nor no"|yes\nlast|3\n'),
        ("rows.tsv", b'problem\tanswer\nWhat is 1,000 + 1?\t1001\n"Say ""yes""\r\nor no"\tyes\nlast\t3'),
    ],
)
def test_csv_is_read_whatever_separates_its_fields(tmp_path: Path, name: str, content: bytes) -> None:
    assert texts(read(written(tmp_path / name, content))) == CSV_ROWS


def test_every_mistake_of_a_csv_is_told_by_line(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.csv", 'question,answer\na,1\nb,1,2\n"c"d,1\n"two\nlines",\ne\ng,7\n"open,1\n')
    told = refused(file)
    begins = [
        "line 3: it has 3 fields, separated by commas, and the header 2",
        "line 4: not CSV",
        "line 5: column 'answer': is empty",
        "line 7: it has 1 fields, separated by commas, and the header 2: write an empty field",
        "line 9: not CSV (unexpected end of data)",
    ]
    assert len(told) == len(begins) and all(map(str.startswith, told, begins)), told
    assert refused(written(tmp_path / "a.csv", "question,answer,answer\na,1,2\n")) == [
        "line 1: it has several columns 'answer': rename or remove all but one"
    ]
    assert refused(written(tmp_path / "e.csv", "sep=;\nquestion;answer\na;1;2\n"))[0].startswith("line 3: it has 3 fields")
    assert "did you mean output?" in refused(written(tmp_path / "f.csv", "question,output\na,1\n"))[0]
    assert "not UTF-8" in refused(written(tmp_path / "b.csv", "question,answer\né,1\n".encode("latin-1")))[0]
    assert "gzip" in refused(written(tmp_path / "c.csv", b"\x1f\x8b\x08\x00"))[0]
    assert "has no rows" in refused(written(tmp_path / "d.csv", "question,answer\n"))[0]


def test_the_same_rows_have_one_name_in_csv_and_json(tmp_path: Path) -> None:
    rows = [{"question": question, "answer": answer} for question, answer in CSV_ROWS]
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    names = {read(tmp_path / "rows.csv").name, read(as_list(tmp_path, rows)).name, read(as_lines(tmp_path, rows)).name}
    assert len(names) == 1


ROW, OTHER = '{"question": "q", "answer": 1}', '{"question": "r", "answer": 1}'
MANY = ",".join(json.dumps({"question": f"{number} " * 40, "answer": 1}) for number in range(3000))


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (f"[{ROW}]", 1),
        (f"\ufeff \n[\n {ROW} ,\n {OTHER}\n]\n", 2),
        (f"{ROW}\n{OTHER}\n", 2),
        (f"[{MANY}]", 3000),
    ],
)
def test_json_is_a_list_of_objects_or_lines_of_them(tmp_path: Path, content: str, count: int) -> None:
    assert len(read(written(tmp_path / "rows.json", content))) == count


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"[{ROW}, {OTHER}", "not JSON (Expecting ',' delimiter, line 1, after"),
        (f'[{ROW},\n{{"question": "r"\n\n "answer": 1}}]', 'line 2, after {"question": "r"): write a \',\' there'),
        (f"[{ROW},\n{ROW}\n\n", "it ends before its list does"),
        (f"[{ROW},\n{OTHER} {ROW}]", f"not JSON (Expecting ',' delimiter, line 2, after {OTHER})"),
        (f"[{ROW}] x", "not JSON (Extra data, line 1, at "),
        (f"[{ROW},\n\n{{'question': 1}}]", "not JSON (Expecting property name enclosed in double quotes, line 3, at {"),
        (f"[{ROW},\n]", "line 1, after"),
        (f"[{ROW}, [1], 3]", "row 2: not a JSON object"),
        ('[{"question": "q", "answer": 1, "answer": 2}]', "row 1: the key 'answer' stands twice"),
        ("[]", "it has no rows"),
        ("", "it has no rows"),
        ("question,answer\n", "not JSON (Expecting value, line 1)"),
        ('{"rows": [\n' + ROW + "\n]}", "row 1: not JSON"),
        ("[" * 100_000, "not JSON (nested too deeply)"),
    ],
)
def test_json_that_is_no_list_of_rows_is_told_by_row(tmp_path: Path, content: str, said: str) -> None:
    told = refused(written(tmp_path / "rows.json", content))
    assert said in told[0], told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "begin", "part", "end", "said"),
    [
        ("rows.json", b"[", b'{"question": "q", "answer": [%s]},' % (b"1," * 50_000 + b"1"), b"", "not JSON (Expecting value"),
        ("rows.json", b'[{"question": "', b"a" * 2**20, b"", "not JSON (Unterminated string"),
        ("rows.json", b"", b" " * 2**20, b"[]", "it has no rows"),
        ("rows.csv", b"question,answer\n", b'"' + b"a" * 2**20, b"", "not CSV"),
        ("rows.csv", b"question,answer\n", b'"a\n",' * 2**18, b"", "within 768 MiB of memory"),
    ],
)
def test_a_text_file_takes_no_more_memory_than_its_rows_may(
    tmp_path: Path, name: str, begin: bytes, part: bytes, end: bytes, said: str
) -> None:
    with (tmp_path / name).open("wb") as out:
        out.write(begin)
        for _ in range(200):
            out.write(part)
        out.write(end)
    code = (
        "import re, sys\nfrom pathlib import Path\nfrom shared.config import TaskSpec\n"
        "from shared.tasks.file_source import FileSourceError, load_rows\n"
        "def most_kb():\n    return int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "before = most_kb()\n"
        "try:\n    load_rows(TaskSpec(path=sys.argv[1]))\nexcept FileSourceError as error:\n    print(str(error)[:2000])\n"
        "print((most_kb() - before) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True, timeout=240, env=dict(os.environ)
    )
    assert done.returncode == 0 and said in done.stdout, done
    assert int(done.stdout.splitlines()[-1]) < 300, done.stdout


@pytest.mark.parametrize(
    ("files", "proposed"),
    [
        ("test-0.jsonl train-0.jsonl", "train-0.jsonl"),
        ("test.csv train.csv validation.csv", "train.csv"),
        ("test/a.jsonl train/a.jsonl", "train"),
        ("validation/dataset_info.json train/dataset_info.json test/dataset_info.json", "train"),
        ("test/dataset_info.json validation/dataset_info.json", ""),
        ("test.jsonl validation.jsonl", ""),
        ("train_a-0.jsonl train_b-0.jsonl", ""),
    ],
)
def test_of_splits_the_training_split_is_proposed_and_no_other(tmp_path: Path, files: str, proposed: str) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / name, ROW + "\n")
    with pytest.raises(FileSourceError) as caught:
        data_files(tmp_path)
    _, says, path = str(caught.value).partition("path = ")
    assert path == (repr(str(tmp_path / proposed)) if proposed else "") and bool(says) == bool(proposed)

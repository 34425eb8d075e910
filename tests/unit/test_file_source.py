"""Tasks from the user's own file: one set of rows whatever the format, plain refusals, and nothing
that a peer can reach.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.verifier.border import Refusal, Refused
from shared.config import ConfigError, TaskSpec, load_config
from shared.contracts.messages import TaskRef
from shared.tasks import (
    HeldOut,
    TaskConfigError,
    TaskError,
    TaskSource,
    check_specs,
    dataset_size,
    derive_task,
    file_formats,
    file_rows,
    file_source,
    held_out_tasks,
)
from shared.tasks.file_columns import ValueProblem, as_text
from shared.tasks.file_source import load_rows, with_row_name
from shared.tasks.specs import checked_config, file_questions
from tests.unit.task_answers import score_answer
from tests.unit.test_border import NOW_S, SUBJECT, border, group, signed, taken_in

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
from pyarrow import parquet  # noqa: E402

ROWS = [
    {"question": "What is 2 + 2?", "answer": 4},
    {"question": "What is 1 / 4?", "answer": 0.25},
    {"question": "What is 10 ** 22?", "answer": 10**22},
]


def jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def spec_of(file: Path, **settings: Any) -> TaskSpec:
    return TaskSpec(source="file", path=str(file), **settings)


def many(file: Path, count: int) -> TaskSpec:
    rows = [{"question": f"What is {number} + 1?", "answer": number + 1} for number in range(count)]
    return with_row_name(spec_of(jsonl(file, rows), verifier="final_number"))


@pytest.fixture(autouse=True)
def _another_process() -> Iterator[None]:
    """Each test holds what it reads itself, as a process of its own would."""
    before, read = dict(file_rows._held), dict(file_source._read)
    file_rows._held.clear()
    file_source._read.clear()
    yield
    file_rows._held.update(before)
    file_source._read.update(read)


def write_jsonl(folder: Path, table: dict[str, list[Any]]) -> Path:
    return jsonl(folder / "rows.jsonl", [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)])


def write_parquet(folder: Path, table: dict[str, list[Any]]) -> Path:
    parquet.write_table(pyarrow.table(table), folder / "rows.parquet", row_group_size=2)
    return folder / "rows.parquet"


def write_dataset(folder: Path, table: dict[str, list[Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(table).save_to_disk(str(folder / "saved"), num_shards=2)
    return folder / "saved"


def write_parts(folder: Path, table: dict[str, list[Any]]) -> Path:
    (folder / "parts").mkdir()
    whole = pyarrow.table(table)
    parquet.write_table(whole.slice(0, 1), folder / "parts" / "train-00000-of-00002.parquet")
    parquet.write_table(whole.slice(1), folder / "parts" / "train-00001-of-00002.parquet")
    return folder / "parts"


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_parquet, write_dataset, write_parts])
def test_the_same_rows_have_one_name_in_every_format(tmp_path: Path, write: Callable[[Path, dict[str, list[Any]]], Path]) -> None:
    table = {"id": [7, 8, 9], "question": ["a?", "b é?", "c\n?"], "answer": [1.0, 2.5, -3.0]}
    plain, other = load_rows(spec_of(write_jsonl(tmp_path, table))), load_rows(spec_of(write(tmp_path, table)))
    assert plain.name == other.name
    assert [other.row(index) for index in range(3)] == [("a?", "1"), ("b é?", "2.5"), ("c\n?", "-3")]


def test_order_columns_and_contents_make_the_name(tmp_path: Path) -> None:
    names = set()
    for place, rows in enumerate([ROWS, ROWS[::-1], ROWS[:2], [{**ROWS[0], "answer": 5}, *ROWS[1:]]]):
        names.add(load_rows(spec_of(jsonl(tmp_path / f"{place}.jsonl", rows))).name)
    moved = [{"problem": row["question"], "solution": row["answer"]} for row in ROWS]
    assert len(names) == 4
    assert load_rows(spec_of(jsonl(tmp_path / "moved.jsonl", moved), question="problem", answer="solution")).name in names
    # What one text ends with is not what the next begins with.
    shifted = [[{"question": "ab", "answer": "c"}], [{"question": "a", "answer": "bc"}]]
    assert len({load_rows(spec_of(jsonl(tmp_path / "shifted.jsonl", rows))).name for rows in shifted}) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (3.0, "3"),
        (Decimal("3.00"), "3"),
        (-0.0, "0"),
        (1e-7, "0.0000001"),
        (1e22, "1" + 22 * "0"),
        (Decimal("1E+3"), "1000"),
        (0.1, "0.1"),
        (True, "true"),
        (" 3.0 ", " 3.0 "),
    ],
)
def test_a_number_has_one_text(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), [1], {"a": 1}, b"x", Decimal("NaN")])
def test_what_is_no_text_and_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueProblem):
        as_text(value)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
                lambda text: text.strip() and text[0] != "\0"
            ),
            st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans()),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda row: row[0],
    )
)
def test_rows_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, Any]]) -> None:
    file = jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", [{"question": q, "answer": a} for q, a in rows])
    held = load_rows(spec_of(file))
    assert [held.row(index) for index in range(len(held))] == [(question, as_text(answer)) for question, answer in rows]
    assert sorted(held.shuffled(0)) == list(range(len(rows)))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], ["has no rows"]),
        (["\n\n"], ["has no rows"]),
        ([ROWS[0], "{'question': 1}\n"], ["line 2", "not JSON", ", column 2)", "correct this line"]),
        (["[1, 2]\n"], ["line 1", "not a JSON object"]),
        ([ROWS[0], '{"question": "q"\n'], ["line 2", ", column 17)", "write one object per line"]),
        ([{"question": "q", "anwser": 4}], ["no column 'answer'", "(did you mean anwser?)", "`swarm task`: --columns"]),
        ([{"text": "q", "solution": 4}], ["no column 'question' (nor prompt, problem, messages); its columns are solution, text"]),
        ([{"question": "q", "answer": None}], ["line 1", "column 'answer': has no value"]),
        ([{"question": "q", "answer": ["4"]}], ["line 1: column 'answer'", "several values"]),
        (['{"question": "q", "answer": NaN}\n'], ["line 1", "not a number"]),
        ([{"question": " \n", "answer": "4"}], ["line 1", "column 'question': is empty"]),
        ([{"question": "q", "answer": ""}], ["line 1", "column 'answer': is empty"]),
        ([{"question": "q" * 262_145, "answer": "4"}], ["line 1", "262,145 characters", "at most 262,144"]),
        (
            [ROWS[0], {"question": "q", "answer": "4" * 65_537}],
            ["line 2: column 'answer': has 65,537", "more than 65,536 earns 0"],
        ),
        (['{"question": "q", "answer": 4, "answer": 5}\n'], ["line 1: the key 'answer' stands twice"]),
        (['{"question": "\\ud800", "answer": 1}\n'], ["line 1", "half a character"]),
        ([*ROWS, {**ROWS[0], "answer": 5}], ["line 4: the same question as in line 1, 'What is 2 + 2?'", "'5' and not '4'"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path, rows: list[Any], said: list[str]) -> None:
    file = jsonl(tmp_path / "questions.jsonl", rows)
    with pytest.raises(TaskConfigError) as caught:
        check_specs([spec_of(file)])
    for part in ["[[tasks]] 1: ", str(file), *said]:
        assert part in str(caught.value)


@pytest.mark.slow
def test_a_path_that_names_no_rows_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text("question,answer\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "splits" / "test").mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    (tmp_path / "splits" / "test" / "dataset_info.json").write_text("{}")
    (tmp_path / "mixed").mkdir()
    for split in ("train", "test"):
        jsonl(tmp_path / "mixed" / f"{split}-00000-of-00001.jsonl", ROWS)
    (tmp_path / "bad.parquet").write_text("no table")
    (tmp_path / "latin.jsonl").write_bytes('{"question": "\u00e9", "answer": 1}\n'.encode("latin-1"))
    parquet.write_table(pyarrow.table({"question": ["q"], "reply": ["a"]}), tmp_path / "other.parquet")
    for name, said in {
        "none.jsonl": "no such file or folder",
        "table.txt": "an unknown kind of file",
        "empty": "holds no .jsonl, .json, .csv, .tsv, .parquet, .arrow file",
        "splits": "several splits (test)",
        "mixed": "different names or formats (test-00000-of-00001.jsonl, train-00000-of-00001.jsonl)",
        "bad.parquet": "cannot be read as parquet",
        "latin.jsonl": "line 1: not UTF-8",
        "other.parquet": "; its columns are question, reply",
    }.items():
        with pytest.raises(file_formats.FileSourceError, match="(?s)" + name.replace(".", r"\.")) as caught:
            load_rows(spec_of(tmp_path / name))
        assert said in str(caught.value), name


@pytest.mark.slow
def test_values_that_python_has_no_object_for_are_refused_with_row_and_column(tmp_path: Path) -> None:
    """Text that is not UTF-8, a time after the year 9999, a time zone that nobody knows."""
    halves = [pyarrow.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0])), pyarrow.py_buffer(b"ok\xff\xfe")]
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, *halves])
    late = pyarrow.array([1, 2**62], pyarrow.timestamp("us"))
    nowhere = pyarrow.array([None, 1], pyarrow.timestamp("us", tz="Nowhere/Land"))
    names = ["a", "b"]
    for name, table, said in (
        ("text.parquet", {"question": bad, "answer": names}, "row 2: column 'question': its string cannot be read"),
        ("late.parquet", {"question": names, "answer": late}, "row 2: column 'answer': its timestamp[us] cannot be read"),
        ("zone.parquet", {"question": names, "answer": nowhere}, "cannot be read ('Nowhere/Land'): write it as text"),
    ):
        parquet.write_table(pyarrow.table(table), tmp_path / name)
        with pytest.raises(file_formats.FileSourceError, match=re.escape(said)):
            load_rows(spec_of(tmp_path / name))
    table = pyarrow.table({"question": bad, "answer": names})
    with pyarrow.OSFile(str(tmp_path / "text.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(file_formats.FileSourceError, match=r"text\.arrow: row 2: column 'question'"):
        load_rows(spec_of(tmp_path / "text.arrow"))


def test_a_path_too_long_to_be_one_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(file_formats.FileSourceError, match=r"cannot be accessed \(File name too long\)"):
        load_rows(spec_of(tmp_path / f"{'x' * 300}.jsonl"))


def test_more_than_a_node_can_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    for limit in ("MAX_ROWS", "MAX_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(file_source, limit, 2)
            with pytest.raises(file_formats.FileSourceError, match="a node holds no more"):
                load_rows(spec_of(file))


def test_the_longest_answer_that_earns_and_tags_in_a_question_are_taken(tmp_path: Path) -> None:
    long = {"question": "Put 4 into <answer></answer>.", "answer": "4" * 65_536}
    spec = with_row_name(spec_of(jsonl(tmp_path / "rows.jsonl", [long])))
    assert score_answer(derive_task(TaskRef(dataset=spec.dataset, seed=0, index=0)), "4" * 65_536, "exact") == 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": "file"}, "needs path"),
        ({"source": "file", "path": "x.jsonl", "config": {"a": 1}}, "no settings"),
        ({"source": "file", "path": "x.jsonl", "verifier": "reasoning_gym"}, "use exact"),
        ({"question": "q", "dataset": "gcd"}, 'set source = "file"'),
        ({}, "dataset is missing"),
    ],
)
def test_settings_that_do_not_fit_the_source_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, {"tasks": [given]})


def test_a_configuration_names_its_file_by_its_rows_and_notices_another(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    config = load_config(None, {"tasks": [{"source": "file", "path": str(file)}, {"dataset": "gcd"}], "eval": {"tasks": 2}})
    read = checked_config(config)
    assert [spec.verifier for spec in read.tasks] == ["exact", "reasoning_gym"]
    assert read.tasks[0].dataset == load_rows(read.tasks[0]).name
    assert checked_config(read).tasks == read.tasks
    jsonl(file, ROWS[:2])
    with pytest.raises(TaskConfigError, match="not of file_[0-9a-f]{40}:"):
        checked_config(read)


def test_a_file_that_changes_is_read_again_and_what_runs_keeps_its_rows(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    first = load_rows(spec_of(file))
    assert load_rows(spec_of(file)) is first
    jsonl(file, ROWS[:2])
    assert len(load_rows(spec_of(file))) == 2
    assert derive_task(TaskRef(dataset=first.name, seed=0, index=2)).answer == str(10**22)


def test_a_reference_reaches_only_rows_that_this_process_holds(tmp_path: Path) -> None:
    spec = many(tmp_path / "rows.jsonl", 5)
    ref = TaskRef(dataset=spec.dataset, seed=123, index=3)
    assert (derive_task(ref).text, derive_task(ref).answer) == ("What is 3 + 1?", "4")
    assert dataset_size(spec.dataset, "{}") == 5
    for reason, wrong in {
        "task_index": TaskRef(dataset=spec.dataset, seed=0, index=5),
        "task_config": TaskRef(dataset=spec.dataset, config='{"path":"/etc/passwd"}', seed=0, index=0),
        "task_dataset": TaskRef(dataset="file_" + "0" * 40, seed=0, index=0),
    }.items():
        with pytest.raises(TaskError) as caught:
            derive_task(wrong)
        assert caught.value.reason == reason


def test_peers_with_the_rows_take_a_group_in_and_peers_without_refuse_it_without_blame(tmp_path: Path) -> None:
    spec = many(tmp_path / "rows.jsonl", 5)
    question = derive_task(TaskRef(dataset=spec.dataset, seed=1, index=2))
    payload = signed(group(task=question))
    taken_in(border(tmp_path / "with", accept="any"), SUBJECT, payload)
    file_rows._held.clear()
    for accept in ("any", "dataset", "same"):
        refused = border(tmp_path / "without", accept=accept).examine(SUBJECT, payload, NOW_S)
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.blamed) == (Refusal.TASK_NOT_ALLOWED, None)


def test_held_out_rows_are_spread_over_a_sorted_file_and_never_drawn_for_training(tmp_path: Path) -> None:
    spec = many(tmp_path / "rows.jsonl", 400)
    tasks = held_out_tasks([spec], 100)
    assert len({task.text for task in tasks}) == 100
    assert 25 < sum(task.ref.index < 200 for task in tasks) < 75
    assert [task.ref.index for task in held_out_tasks([spec], 100)] == [task.ref.index for task in tasks]
    assert {task.ref.index for task in held_out_tasks([spec], 100, draw=1)} != {task.ref.index for task in tasks}
    held_out = HeldOut(tasks)
    drawn = {next(TaskSource([spec], node="a", seed=1).candidates(draw, held_out)).text for draw in range(600)}
    assert len(drawn) > 200
    assert not any(held_out.contains_text(question) for question in drawn)


def test_the_example_of_the_documentation_can_be_used(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    lines = page.split("```json\n")[1].split("```")[0]
    (entry,) = tomllib.loads(page.split("`mine.toml`:\n\n```toml\n")[1].split("```")[0])["tasks"]
    (tmp_path / "questions.jsonl").write_text(lines, encoding="utf-8")
    specs = [with_row_name(TaskSpec(**{**entry, "path": str(tmp_path / entry["path"])}))]
    check_specs(specs, 1)
    assert [derive_task(TaskRef(dataset=specs[0].dataset, seed=0, index=i)).answer for i in range(3)] == ["12", "0.25", "21"]


def test_a_file_too_small_for_evaluation_says_so(tmp_path: Path) -> None:
    spec = many(tmp_path / "rows.jsonl", 30)
    check_specs([spec], 15)
    with pytest.raises(TaskConfigError, match="it has 30 different questions, and 16 of them would be held out"):
        check_specs([spec], 16)
    with pytest.raises(
        TaskConfigError, match=r"\[\[tasks\]\] 2: .* it has 30 different questions, and 16 of them would be held out"
    ):
        check_specs([spec, spec], 16)
    with pytest.raises(TaskConfigError, match="30 different questions, and all would be held out .* leaves none to train on"):
        check_specs([spec], 200)
    remedy = "it has one question, and it would be held out .* leaves none to train on: set eval.tasks = 0 .*, or add rows"
    for held_out in (1, 200):
        with pytest.raises(TaskConfigError, match=remedy):
            check_specs([many(tmp_path / "one.jsonl", 1)], held_out)


def test_questions_that_differ_only_in_case_and_spacing_count_once_but_may_have_different_answers(tmp_path: Path) -> None:
    written = ["What is  3?", "what is 3?", "WHAT IS 3?", "What is 3? "]
    rows = [{"question": question, "answer": number} for number, question in enumerate(written)]
    spec = with_row_name(spec_of(jsonl(tmp_path / "rows.jsonl", rows)))
    assert len(held_out_tasks([spec], 2)) == 1
    with pytest.raises(TaskConfigError, match="it has one question, and it would be held out"):
        check_specs([spec], 2)
    others = [{"question": "And 4?", "answer": 4}, {"question": "Is 5 a number?", "answer": "yes"}]
    spec = with_row_name(spec_of(jsonl(tmp_path / "more.jsonl", rows + others)))
    held_out = HeldOut(held_out_tasks([spec], 1))
    assert [each.questions for each in file_questions([spec], 1)] == [3] and check_specs([spec], 1) == [spec]
    assert next(TaskSource([spec], node="a", seed=1).candidates(0, held_out))

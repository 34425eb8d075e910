"""What is counted in answers of before and after training: rules, kinds of question, and gains with
an interval over facts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lab.answers import Answer, begun, gain, judged, main, read_answers
from shared.contracts.messages import TaskRef
from shared.tasks.prompt import text_task

REPO = Path(__file__).parents[2]


def answered(question: str, reference: str, answer: str = "", reward: float = 0.0, dataset: str = "chain_sum") -> Answer:
    return Answer(dataset, question, reference, answer, reward)


def test_a_fact_is_the_same_in_either_order_and_other_words() -> None:
    facts = {answered(text, "").fact for text in ("What is 3 + 4?", "State the final answer: 4 + 3 =", "3 + 4")}

    assert len(facts) == 1
    assert answered("3 - 4", "").fact != answered("4 - 3", "").fact
    assert answered("3 * 4", "").fact != answered("3 + 4", "").fact
    assert answered("How many legs has a cow?", "4").fact == "How many legs has a cow?"
    assert answered("What is -3 - -4?", "1").operation == (-3, "-", -4)


@pytest.mark.parametrize(
    "question",
    [
        "3 + 4 + 5",
        "What is 10 - 3 - 2?",
        "1.5 + 2",
        "1 + 2.5",
        ".5 + 2",
        "1,000 + 2",
        "2 + 1,000",
        "(3 + 4) * 2",
        "(3 + 4)",
        "-(3 + 4)",
        "(-3 + 4)",
        "3 + 4 = ? 5 * 6",
        "x + 3 + 4",
        "x3 + 4",
        "3 + 4x",
        "3 + 4 + x",
        "3 + 4!",
        "\N{MINUS SIGN}3 + 4",
        "9" * 5000 + " + 1",
        "\N{ARABIC-INDIC DIGIT THREE} + \N{ARABIC-INDIC DIGIT FOUR}",
    ],
)
def test_a_question_of_another_form_is_told_apart(question: str) -> None:
    assert answered(question, "").operation is None
    assert answered(question, "").fact == question
    with pytest.raises(ValueError, match="does not ask for a sum"):
        begun(question)


def test_a_gain_that_hangs_on_one_fact_has_a_wide_interval() -> None:
    """Ten questions of one fact are one observation: without clusters the interval would exclude
    nothing gained.
    """
    base = [answered("3 + 4", "7")] * 10 + [answered(f"{n} + 9", str(n + 9)) for n in range(10, 20)]
    after = [answered("3 + 4", "7", reward=1.0)] * 10 + base[10:]

    found = gain(base, after)

    assert (found.mean, found.won, found.lost, found.facts) == (0.5, 10, 0, 11)
    assert found.low == 0.0
    assert found.high > 0.5
    spread = [answered(f"{n} + 9", str(n + 9)) for n in range(20)]
    half = [answered(f"{n} + 9", str(n + 9), reward=float(n % 2)) for n in range(20)]
    assert gain(spread, half).low > 0.2


def test_other_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="different questions"):
        gain([answered("3 + 4", "7")], [answered("3 + 5", "8")])


def test_files_become_pass_rates_and_gains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, reward in (("base", "no idea", 0.0), ("trained", "the sum is 7", 1.0)):
        one = {"dataset": "chain_sum", "question": "3 + 4", "reference": "7", "answer": text, "reward": reward}
        (tmp_path / f"{name}.json").write_text(json.dumps({"answers": [one] * 3}))
    assert main([str(tmp_path / "base.json"), str(tmp_path / "trained.json")]) == 0
    out = capsys.readouterr().out
    assert "base: 0/3 passed" in out and "trained: 3/3 passed" in out
    assert "trained over base: +1.000" in out


def test_a_file_without_answers_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.json").write_text('{"pass_rate": 0.5}')

    assert main([str(tmp_path / "none.json")]) == 1
    assert "--answers" in capsys.readouterr().err
    assert main([str(tmp_path / "missing.json")]) == 1


def test_questions_without_a_reference_answer_are_read(tmp_path: Path) -> None:
    """As `swarm eval` writes what reasoning_gym's own scorer judges."""
    (tmp_path / "one.json").write_text(json.dumps({"answers": [{**SUM, "reference": None, "answer": "9" * 401}]}))

    (found,) = read_answers(tmp_path / "one.json")

    assert found.passed


SUM = {"dataset": "chain_sum", "question": "3 + 4", "reference": "7", "answer": "7", "reward": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "null",
        "[" * 100_000,
        "\udcff",
        '{"answers": "abc"}',
        '{"answers": ["a"]}',
        '{"answers": [{"dataset": "x"}]}',
        json.dumps({"answers": [{**SUM, "reward": None}]}),
        json.dumps({"answers": [{**SUM, "reward": "1"}]}),
        json.dumps({"answers": [{**SUM, "answer": None}]}),
        json.dumps({"answers": [{**SUM, "reference": 7}]}),
        json.dumps({"answers": [{**SUM, "question": None}]}),
    ],
)
def test_a_file_that_is_no_record_is_refused_in_a_sentence(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))

    assert main([str(path)]) == 1

    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(str(path))
    assert "make it with `swarm eval MODEL --answers 1000 --json`" in said


@pytest.mark.parametrize(
    ("rest", "right", "said"),
    [
        (" 7.", True, "3 + 4 = 7"),
        (" 7\n\nThis is 8", True, "3 + 4 = 7"),
        (" 71", False, "3 + 4 = 71"),
        (" seven, or 7", False, "3 + 4 = seven, or 7"),
        (" -7", False, "3 + 4 = -7"),
        ("", False, "3 + 4 ="),
        (" 7 + 1", True, "3 + 4 = 7"),
        (" 7.This is", True, "3 + 4 = 7"),
        (" 7.0", True, "3 + 4 = 7.0"),
        (" 7/2", False, "3 + 4 = 7/2"),
        (" 7e5", False, "3 + 4 = 7e5"),
        (" 7,5", False, "3 + 4 = 7,5"),
        (" 7.5.1", False, "3 + 4 = 7.5.1"),
        (" 7th", False, "3 + 4 = 7th"),
        (" 7*2", False, "3 + 4 = 7*2"),
        (" 7%", False, "3 + 4 = 7%"),
        (" **7**", False, "3 + 4 = **7**"),
    ],
)
def test_the_first_number_after_the_given_beginning_is_the_answer(rest: str, right: bool, said: str) -> None:
    task = text_task(TaskRef(dataset="chain_sum", config="{}", seed=1, index=0), "What is 3 + 4?", "7")
    found = judged(task, begun(task.text), rest)
    assert (found.reward, found.answer) == (float(right), said)


@pytest.mark.parametrize(
    ("rest", "reference", "right"),
    [
        (" \N{MINUS SIGN}7", "-7", True),
        (" \N{MINUS SIGN}7", "7", False),
        (" .8", "0.8", True),
        (" no", "yes", False),
        (" 7", "", False),
    ],
)
def test_a_begun_answer_is_read_as_it_is_written(rest: str, reference: str, right: bool) -> None:
    task = text_task(TaskRef(dataset="chain_sum", config="{}", seed=1, index=0), "What is 3 + 4?", reference)
    assert judged(task, "3 + 4 =", rest).reward == float(right)


def test_a_begun_answer_of_a_task_without_a_number_is_never_right() -> None:
    task = text_task(TaskRef(dataset="chain_sum", config="{}", seed=1, index=0), "What is 3 + 4?", "yes")
    assert judged(task, "3 + 4 =", " " + "9" * 401).reward == 0.0


def test_a_missing_model_and_no_held_out_questions_are_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "node.toml"
    for tasks, said in ((1, "no-such-model"), (0, "eval.tasks")):
        config.write_text(
            f'[eval]\ntasks = {tasks}\n[[tasks]]\ndataset = "chain_sum"\nconfig = {{ min_terms = 2, max_terms = 2 }}\n'
        )
        assert main(["--begun", str(tmp_path / "no-such-model"), "--config", str(config)]) == 1
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.out == ""


def test_a_question_without_a_sum_has_no_form_to_give() -> None:
    with pytest.raises(ValueError, match="does not ask for a sum"):
        begun("How many legs has a cow?")


ANSWERS = REPO / "experiments/results/smollm2-demo/answers"
SEEDS = sorted(file.stem for file in ANSWERS.glob("seed*-24.json"))


@pytest.mark.slow
def test_the_page_of_results_gives_the_differences_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPO / "docs/results.md").read_text()
    assert main([str(ANSWERS / f"{name}.json") for name in ("base-given", *SEEDS)]) == 0
    found = re.findall(r"^(\S+) over \S+: (\S+ \(\S+ to \S+);", capsys.readouterr().out, flags=re.MULTILINE)
    assert [name for name, _ in found] == SEEDS and len(SEEDS) == 6
    assert [f"{name}: {interval})" for name, interval in found if f"| {interval}) |" not in page] == []

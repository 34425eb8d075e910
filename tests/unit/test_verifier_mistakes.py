"""Mistakes in a user's own verifier are told by name and cost nobody a process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.config.task_sections import TaskSpec
from shared.contracts.messages import TaskRef
from shared.registry import VERIFIERS
from shared.rewards import Mark
from shared.tasks.answers import MAX_ANSWER_CHARS
from shared.tasks.derive import derive_item
from shared.tasks.file_source import with_row_name
from shared.tasks.sandbox import ScorerPool, ScoringJob
from shared.tasks.scoring import score_texts
from shared.tasks.specs import source_problems
from shared.tasks.verifiers import load_verifier
from swarm_cli.app import app
from tests.integration.installed_verifier import install

GCD = TaskSpec(dataset="gcd", verifier="mine")
PANIC = "class Panic(BaseException): pass\n"
"""As a library in Rust raises it: no `Exception`."""
MISTAKES = {
    "def mine(item):\n    return float('blue')": "verifier mine cannot judge this task: ValueError: could not convert",
    "def mine(item):\n    raise SystemExit('bye')": "verifier mine cannot judge this task: SystemExit: bye",
    f"{PANIC}def mine(item):\n    raise Panic('rust')": "verifier mine cannot judge this task: Panic: rust",
    "def mine(item):\n    lambda answer: 1.0": "verifier mine made NoneType and no function that scores answers: `return` it",
    "mine = 'a word'": "verifier mine cannot judge this task: TypeError: 'str' object is not callable",
}
UNKNOWN = {
    "def mine(item):\n    return lambda answer: 'yes'": (Mark.NOT_A_NUMBER, "returned str (yes)"),
    "def mine(item):\n    return lambda answer: None": (Mark.NOT_APPLICABLE, ""),
    "def mine(item):\n    return lambda answer: float('nan')": (Mark.NOT_A_NUMBER, "returned float (nan)"),
    "def mine(item):\n    return lambda answer: -float('inf')": (Mark.NOT_A_NUMBER, "returned float (-inf)"),
    "def mine(item):\n    return lambda answer: 10**400": (Mark.NOT_A_NUMBER, "returned int"),
    "def mine(item):\n    return lambda answer: 2e9": (Mark.NOT_A_NUMBER, "returned float (2000000000.0)"),
    "def mine(item):\n    return lambda answer: (1.0, 'yes')": (Mark.NOT_A_NUMBER, "returned tuple"),
    "def mine(item):\n    return lambda answer: 1 / 0": (Mark.RAISED, "raised ZeroDivisionError"),
    "def mine(item):\n    return lambda answer: float(answr == 1)": (Mark.RAISED, "raised NameError: name 'answr'"),
    "def mine(item):\n    return lambda answer: __import__('sys').exit('bye')": (Mark.RAISED, "raised SystemExit: bye"),
    f"{PANIC}def judged(answer):\n    raise Panic('rust')\ndef mine(item):\n    return judged": (Mark.RAISED, "raised Panic: rust"),
    "def mine(item):\n    return lambda answer: open('/no/such/file')": (Mark.RAISED, "raised FileNotFoundError"),
}
RETURNED = {
    "lambda answer: 2": (2.0, Mark.UNSAID),
    "lambda answer: True": (1.0, Mark.UNSAID),
    "lambda answer: -3.5": (-3.5, Mark.UNSAID),
    "lambda answer: numpy.float32(0.5)": (0.5, Mark.UNSAID),
    "lambda answer: numpy.bool_(True)": (1.0, Mark.UNSAID),
    "lambda answer: decimal.Decimal('1.5')": (1.5, Mark.UNSAID),
    "lambda answer: (0.96, True)": (0.96, Mark.PASSED),
    "lambda answer: (7, numpy.bool_(False))": (7.0, Mark.FAILED),
    "lambda answer: (7, None)": (7.0, Mark.UNSAID),
    "lambda answer: types.SimpleNamespace(reward=3, passed=True)": (3.0, Mark.PASSED),
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """A package with the code that the test is called with as its verifier `mine`."""
    folder = tmp_path / "installed"
    folder.mkdir()
    install(folder, monkeypatch, "mine", request.param)
    load_verifier.cache_clear()
    yield
    load_verifier.cache_clear()
    VERIFIERS.look_again()


@pytest.mark.parametrize(("written", "said"), MISTAKES.items(), indirect=["written"])
def test_config_check_says_what_a_verifier_does_wrong(written: None, said: str) -> None:
    (problem,) = source_problems([GCD])
    assert said in problem


@pytest.mark.parametrize(("written", "unknown"), UNKNOWN.items(), indirect=["written"])
def test_what_raises_or_is_no_finite_number_is_unknown_and_never_0(written: None, unknown: tuple[Mark, str]) -> None:
    """That is no mistake by itself: a reference answer need not have the form of an answer."""
    assert source_problems([GCD]) == []
    problems: list[str] = []
    mark, said = unknown
    found = score_texts(derive_item(TaskRef(dataset="gcd", seed=1, index=0)), "mine", ["x", "y"], problems=problems)
    assert found == ([None, None], [mark, mark])
    assert [each.startswith(said) for each in problems] == [True] * bool(said), problems


@pytest.mark.parametrize(
    ("written", "known"),
    [(f"import decimal, numpy, types\ndef mine(item):\n    return {scorer}", known) for scorer, known in RETURNED.items()],
    indirect=["written"],
)
def test_a_reward_is_any_finite_number_and_may_say_whether_it_passes(written: None, known: tuple[float, Mark]) -> None:
    found = score_texts(derive_item(TaskRef(dataset="gcd", seed=1, index=0)), "mine", ["x"])
    assert found == ([known[0]], [known[1]])


@pytest.mark.parametrize("written", ["def mine(item):\n    return lambda answer: -float(len(answer))"], indirect=True)
def test_a_text_too_long_to_be_scored_earns_0_of_a_built_in_verifier_only(written: None) -> None:
    """0 may be the best that a reward of one's own has."""
    item, text = derive_item(TaskRef(dataset="gcd", seed=1, index=0)), "x" * (MAX_ANSWER_CHARS + 1)
    assert score_texts(item, "mine", [text]) == ([None], [Mark.TOO_LONG])
    assert score_texts(item, "exact", [text]) == ([0.0], [Mark.FAILED])


def test_the_same_tasks_have_one_verifier(tmp_path: Path) -> None:
    """A group names its dataset and settings, and not the entry that it was drawn from."""
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": 3}\n{"question": "b", "answer": 4}\n')
    (tmp_path / "b.jsonl").write_text('{"question": "a", "answer": 3}\n{"question": "b", "answer": 4}\n')
    first, again = (TaskSpec(source="file", path=str(tmp_path / name), verifier="exact") for name in ("a.jsonl", "b.jsonl"))
    assert source_problems([first, again]) == []
    (problem,) = source_problems([first, again.model_copy(update={"verifier": "final_number"})])
    assert problem.startswith("[[tasks]] 2: an earlier entry has the same tasks and scores them by verifier exact"), problem
    (problem,) = source_problems([first, again.model_copy(update={"pass_at": 0.5})])
    assert "(verifier exact with pass_at 0.5)" in problem, problem


NUMBERS_ALONE = "def mine(item):\n    wanted = float(item.task.answer)\n    return lambda answer: float(float(answer) == wanted)"


@pytest.mark.parametrize("written", [NUMBERS_ALONE], indirect=True)
def test_the_row_that_it_cannot_judge_is_named(written: None, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"q{n}", "answer": n if n != 2 else "blue"}) + "\n" for n in range(4)))
    (problem,) = source_problems([TaskSpec(source="file", path=str(rows), verifier="mine")])
    assert "line 3" in problem and "cannot judge this task: ValueError" in problem, problem


@pytest.mark.slow
@pytest.mark.parametrize("written", [NUMBERS_ALONE], indirect=True)
async def test_a_task_that_it_cannot_judge_costs_no_process_and_its_sender_no_blame(written: None, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a", "answer": 3}\n{"question": "b", "answer": "blue"}\n')
    spec = with_row_name(TaskSpec(source="file", path=str(rows), verifier="mine"))
    refs = [TaskRef(dataset=spec.dataset, seed=1, index=index) for index in (1, 0)]
    async with ScorerPool(workers=1, answer_timeout_s=5.0, memory_mb=2048, tasks=[spec], foreign_workers=1) as pool:
        for sender in (None, "somebody"):
            refused, scored = await pool.run([ScoringJob(ref=ref, texts=["3"], sender=sender) for ref in refs])
            assert refused.reason == "task_verifier" and "ValueError" in refused.detail, refused
            assert scored.reason is None and list(scored.rewards) == [1.0] and scored.detail == ""
        texts = ["3", "three\x1b[31m", "four"]
        jobs = [ScoringJob(ref=refs[1], texts=texts, sender=sender) for sender in (None, "somebody")]
        own, foreign = await pool.run(jobs)
        assert own.rewards == foreign.rewards == [1.0, None, None]
        assert own.marks == foreign.marks == [Mark.UNSAID, Mark.RAISED, Mark.RAISED]
        assert own.detail == r"raised ValueError: could not convert string to float: 'three\x1b[31m'"
        assert foreign.detail == "", "nothing of what a member sent"
        assert pool.replaced == 0


@pytest.mark.slow
@pytest.mark.parametrize("written", ["def mine(item):\n    return lambda answer: print(answer)"], indirect=True)
def test_task_score_says_why_an_answer_has_no_reward(written: None) -> None:
    told = CliRunner().invoke(app, ["task", "score", "gcd", "--verifier", "mine", "--answer", "3"])
    assert (told.exit_code, told.stdout) == (0, "unknown (not_applicable)\n")
    assert "verifier mine says by None" in told.stderr

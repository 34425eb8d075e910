"""Mistakes in a user's own verifier are told by name and cost nobody a process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.config.task_spec import TaskSpec
from shared.contracts.messages import TaskRef
from shared.registry import VERIFIERS
from shared.tasks.derive import derive_task
from shared.tasks.file_source import with_row_name
from shared.tasks.sandbox import ScorerPool, ScoringJob
from shared.tasks.scoring import score_answer
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
    "def mine(item):\n    return lambda answer: 'yes'": "verifier mine returned str (yes) for the reference answer: have it",
    "def mine(item):\n    return lambda answer: None": "verifier mine returned NoneType (None) for the reference answer",
    "def mine(item):\n    return lambda answer: float('nan')": "verifier mine returned float (nan) for the reference answer",
    "def mine(item):\n    return lambda answer: float(answr == 1)": "verifier mine raised NameError: name 'answr' is not defined",
    "def mine(item):\n    return lambda answer: __import__('sys').exit('bye')": "verifier mine raised SystemExit: bye",
    f"{PANIC}def judged(answer):\n    raise Panic('rust')\ndef mine(item):\n    return judged": "verifier mine raised Panic: rust",
    "def mine(item):\n    return lambda answer: float(item.answer == answer)": "verifier mine raised AttributeError: 'Item' object",
    "def mine(item):\n    return lambda answer: open('/no/such/file')": "verifier mine raised FileNotFoundError",
    "mine = 'a word'": "verifier mine cannot judge this task: TypeError: 'str' object is not callable",
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


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ("def mine(item):\n    return lambda answer: float(answer == item.task.answer)", 0.0),
        ("def mine(item):\n    return lambda answer: 1 / 0", 0.0),
        ("import re\ndef mine(item):\n    return lambda answer: float(re.match('<(.)>', answer).group(1))", 0.0),
        ("def mine(item):\n    return lambda answer: 10**400", 1.0),
    ],
    indirect=["written"],
)
def test_what_a_scorer_may_do_is_no_problem(written: None, reward: float) -> None:
    """A reference answer need not have the form of an answer, so a scorer may raise for it."""
    assert source_problems([GCD]) == []
    assert score_answer(derive_task(TaskRef(dataset="gcd", seed=1, index=0)), "x", "mine") == reward


def test_the_same_tasks_have_one_verifier(tmp_path: Path) -> None:
    """A group names its dataset and settings, and not the entry that it was drawn from."""
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": 3}\n{"question": "b", "answer": 4}\n')
    (tmp_path / "b.jsonl").write_text('{"question": "a", "answer": 3}\n{"question": "b", "answer": 4}\n')
    first, again = (TaskSpec(source="file", path=str(tmp_path / name), verifier="exact") for name in ("a.jsonl", "b.jsonl"))
    assert source_problems([first, again]) == []
    (problem,) = source_problems([first, again.model_copy(update={"verifier": "final_number"})])
    assert problem.startswith("[[tasks]] 2: an earlier entry has the same tasks and scores them by verifier exact"), problem


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
        jobs = [ScoringJob(ref=refs[1], texts=texts, sender=sender, explain=True) for sender in (None, "somebody")]
        own, foreign = await pool.run(jobs)
        assert own.rewards == foreign.rewards == [1.0, 0.0, 0.0]
        assert own.detail == r"raised ValueError: could not convert string to float: 'three\x1b[31m'"
        assert foreign.detail == "", "nothing of what a member sent"
        assert pool.replaced == 0


@pytest.mark.slow
@pytest.mark.parametrize("written", ["def mine(item):\n    return lambda answer: print(answer)"], indirect=True)
def test_task_score_says_why_an_answer_has_no_reward(written: None) -> None:
    told = CliRunner().invoke(app, ["task", "score", "gcd", "--verifier", "mine", "--answer", "3"])
    assert (told.exit_code, told.stdout) == (0, "0\n")
    assert told.stderr == "verifier mine returned NoneType (None) and no number in [0, 1]: the reward is 0\n"

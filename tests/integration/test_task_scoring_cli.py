"""`swarm task` as a task's author meets it: through the process, scoring in the sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts.messages import TaskRef
from shared.tasks.derive import derive_task
from tests import forked
from tests.forked_commands import Commands

ROOT = Path(__file__).parents[2]
POLYNOMIAL = ("polynomial_multiplication", "--seed", "5", "--index", "1")
"""Depends on Python's hash seed."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`swarm`, which forks: the tests of its hash seed start a real one."""
    folder = tmp_path_factory.mktemp("swarm")
    commands = Commands(folder)
    commands.program(folder / "swarm", "swarm_cli")
    yield str(folder / "swarm")
    commands.close()


def swarm(program: str, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program, "task", *arguments], cwd=ROOT, input=given, capture_output=True, timeout=180)


def with_hash_seed(seed: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "swarm_cli", "task", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(command, cwd=ROOT, env=environment, input=b"", capture_output=True, timeout=180)


def reward(scored: subprocess.CompletedProcess[bytes]) -> float:
    assert scored.returncode == 0, scored.stderr
    last = json.loads(scored.stdout.decode().splitlines()[-1])
    assert list(last) == ["reward", "passed", "unknown", "seconds"]
    assert (last["passed"], last["unknown"]) == (last["reward"] >= 0.99, None)
    return float(last["reward"])


def test_score_prints_the_reward_of_right_wrong_and_hostile_answers_and_ends_with_zero(program: str) -> None:
    task = derive_task(TaskRef(dataset="gcd", config='{"max_value":90}', seed=3, index=5))
    named = ("score", "gcd", "--seed", "3", "--index", "5", "--settings", '{"max_value": 90}', "--json", "--answer")
    assert reward(swarm(program, *named, f"so <answer>{task.answer}</answer>")) == 1.0
    assert reward(swarm(program, *named, "-", given=str(task.answer).encode() + b"\n")) == 1.0
    assert reward(swarm(program, *named, "-", given=b"\xff\xfe\x00")) == 0.0
    assert reward(swarm(program, *named, "")) == 0.0
    assert swarm(program, *named[:-2], "--answer", str(task.answer)).stdout == b"1\n"


def test_tasks_that_depend_on_the_hash_seed_are_shown_and_scored_the_same_under_any() -> None:
    shown = [json.loads(with_hash_seed(seed, "show", *POLYNOMIAL, "--json").stdout) for seed in ("1", "2")]
    assert shown[0] == shown[1]
    assert reward(with_hash_seed("3", "score", *POLYNOMIAL, "--json", "--answer", shown[0]["answer"])) == 1.0


def test_list_names_every_dataset_also_for_programs(program: str) -> None:
    names = json.loads(swarm(program, "list", "--json").stdout)
    assert len(names) >= 105 and {"chain_sum", "power_function", "tsumego"} <= set(names)
    assert swarm(program, "list", "chain_s").stdout.split() == [b"chain_sum", b"decimal_chain_sum"]


def test_what_does_not_exist_or_fit_is_a_sentence_and_another_exit_code() -> None:
    for arguments, said in (
        (("score", "gcdd", "--answer", "1"), "did you mean gcd"),
        (("score", "GCD", "--answer", "1"), "there is no such task"),
        (("show", "questions.csv"), "no such file or folder"),
        (("show", "pyproject.toml"), "an unknown kind of file: give .jsonl, .json, .csv"),
        (("show", "."), "the folder holds no .jsonl, .json, .csv"),
        (("score", "gcd", "--answer", "1", "--settings", "{max"), "--settings is not JSON"),
        (("score", "gcd", "--answer", "1", "--settings", '{"max_valu": 3}'), "did you mean max_value"),
        (("score", "composite", "--answer", "1"), "composite cannot be used"),
        (("show", "gcd", "--index", "900000"), "outside the dataset's 500 items"),
    ):
        refused = forked.run("swarm_cli", ["task", *arguments], environment=os.environ, cwd=ROOT, timeout=180)
        assert refused.returncode not in (0, None), arguments
        assert said in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr

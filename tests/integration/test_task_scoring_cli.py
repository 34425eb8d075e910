"""`swarm task` as a task's author meets it: through the process, scoring in the sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from shared.contracts.messages import TaskRef
from shared.tasks.derive import derive_task
from tests import forked

ROOT = Path(__file__).parents[2]
POLYNOMIAL = ("polynomial_multiplication", "--seed", "5", "--index", "1")
"""Depends on Python's hash seed."""


def swarm(*arguments: str, given: bytes = b"", hash_seed: str = "random") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "swarm_cli", "task", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, cwd=ROOT, env=environment, input=given, capture_output=True, timeout=180)


def reward(scored: subprocess.CompletedProcess[bytes]) -> float:
    assert scored.returncode == 0, scored.stderr
    last = json.loads(scored.stdout.decode().splitlines()[-1])
    assert list(last) == ["reward"]
    return float(last["reward"])


def test_score_prints_the_reward_of_right_wrong_and_hostile_answers_and_ends_with_zero() -> None:
    task = derive_task(TaskRef(dataset="gcd", config='{"max_value":90}', seed=3, index=5))
    named = ("score", "gcd", "--seed", "3", "--index", "5", "--settings", '{"max_value": 90}', "--json", "--answer")
    assert reward(swarm(*named, f"so <answer>{task.answer}</answer>")) == 1.0
    assert reward(swarm(*named, "-", given=str(task.answer).encode() + b"\n")) == 1.0
    assert reward(swarm(*named, "-", given=b"\xff\xfe\x00")) == 0.0
    assert reward(swarm(*named, "")) == 0.0
    assert swarm(*named[:-2], "--answer", str(task.answer)).stdout == b"1\n"


def test_tasks_that_depend_on_the_hash_seed_are_shown_and_scored_the_same_under_any() -> None:
    shown = [json.loads(swarm("show", *POLYNOMIAL, "--json", hash_seed=hash_seed).stdout) for hash_seed in ("1", "2")]
    assert shown[0] == shown[1]
    assert reward(swarm("score", *POLYNOMIAL, "--json", "--answer", shown[0]["answer"], hash_seed="3")) == 1.0


def test_list_names_every_dataset_also_for_programs() -> None:
    names = json.loads(swarm("list", "--json").stdout)
    assert len(names) >= 105 and {"chain_sum", "power_function", "tsumego"} <= set(names)
    assert swarm("list", "chain_s").stdout.split() == [b"chain_sum", b"decimal_chain_sum"]


def test_what_does_not_exist_or_fit_is_a_sentence_and_another_exit_code() -> None:
    for arguments, said in (
        (("score", "gcdd", "--answer", "1"), "did you mean gcd"),
        (("score", "GCD", "--answer", "1"), "there is no such task"),
        (("show", "questions.csv"), "no such file or folder"),
        (("show", "pyproject.toml"), "give a .jsonl or .parquet file"),
        (("show", "."), "the folder holds no .arrow, .parquet, .jsonl file"),
        (("score", "gcd", "--answer", "1", "--settings", "{max"), "--settings is not JSON"),
        (("score", "gcd", "--answer", "1", "--settings", '{"max_valu": 3}'), "did you mean max_value"),
        (("score", "composite", "--answer", "1"), "composite cannot be used"),
        (("show", "gcd", "--index", "900000"), "outside the dataset's 500 items"),
    ):
        refused = forked.run("swarm_cli", ["task", *arguments], environment=os.environ, cwd=ROOT, timeout=180)
        assert refused.returncode not in (0, None), arguments
        assert said in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr

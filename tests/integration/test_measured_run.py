"""A run with an evaluation set, in the processes that `swarm up` starts: what is measured when,
what is kept out of training, and where its results are shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.run_records import read_jsonl
from shared.tasks.prompt import text_key
from tests.nats_server import free_port

REPO = Path(__file__).resolve().parents[2]
CONFIGURATION = f"""
[model]
path = "{REPO}/models/base"
[nats]
swarm_url = "none"
[generator]
max_new_tokens = 8
completions = 4
groups_per_call = 4
[sampler]
local = 4
external = 0
[trainer]
learning_rate = 1e-4
[eval]
tasks = 16
every_versions = 3
[[tasks]]
path = "train.jsonl"
verifier = "final_number"
[[eval.sets]]
name = "doubles"
path = "doubles.jsonl"
reward = "rewards.py:first_digit"
k = 4
every_versions = 2
"""
REWARD = """
def first_digit(answer, reference):
    return 1.0 if answer.strip()[:1] == reference[:1] else 0.0
"""


def _swarm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    where = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "SWARM_HTTP__BASE_PORT": "0"}
    command = [sys.executable, "-m", "swarm_cli", *arguments]
    done = subprocess.run(command, cwd=folder, env={**clean, **where}, capture_output=True, text=True, timeout=400, check=False)
    assert "Traceback" not in done.stderr and done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def _lines(folder: Path, file: str) -> list[dict[str, Any]]:
    return read_jsonl(folder / "var" / "runs" / "one" / "alpha" / file)


@pytest.mark.slow
def test_a_run_measures_its_sets_from_the_base_to_the_last_policy_and_no_version_twice(tmp_path: Path) -> None:
    rows = [{"question": f"What is {number} + {number % 3}?", "answer": str((number + number % 3) % 10)} for number in range(40)]
    doubles = [{"question": f"What is {number} * 2?", "answer": str(2 * number % 10)} for number in range(7)]
    for name, content in (("train.jsonl", rows), ("doubles.jsonl", [*rows[:5], *doubles])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "node.toml").write_text(CONFIGURATION)
    up = ("up", "--run", "one", "--nats-port", str(free_port()))
    began = _swarm(tmp_path, *up, "--steps", "5")
    assert "5 rows to train on are also in [[eval.sets]]" in began.stdout + began.stderr
    first = _lines(tmp_path, "eval_sets.jsonl")
    assert (first[0]["policy_version"], first[-1]["policy_version"]) == (0, 5), "the base policy and the last one"
    assert all((line["set"], line["questions"], line["n"], line["unknown"]) == ("doubles", 12, 48, 0) for line in first)
    asked = {text_key(row["question"]) for row in rows[:5]}
    batches = [line["batch"] for line in _lines(tmp_path, "batches.jsonl")]
    trained = {item["scored"]["group"]["task"]["key"] for batch in batches for item in batch["items"]}
    assert len(trained) > 8 and not trained & asked
    _swarm(tmp_path, *up, "--steps", "7")
    last = _lines(tmp_path, "eval_sets.jsonl")[-1]
    node = "var/runs/one/alpha"
    told = f"set doubles: avg@4 {last['pass_rate']:.3f}, {last['pass_rate'] - first[0]['pass_rate']:+.3f}"
    drawn = _swarm(tmp_path, "plot", "one")
    assert told in drawn.stdout + drawn.stderr and f"pass@4 {last['pass_at']['4']:.3f}" in drawn.stdout + drawn.stderr
    _swarm(tmp_path, "model", "export", "one", "alpha", "trained")
    card = (tmp_path / "trained" / "README.md").read_text()
    assert f"| {first[0]['pass_rate']:.3f} | {last['pass_rate']:.3f} | 7 (this) |" in card, card
    assert f"| {first[0]['pass_at']['4']:.3f} | {last['pass_at']['4']:.3f} | 7 (this) |" in card, card
    asked_again = _swarm(tmp_path, "eval", node, "--set", "doubles", "--engine", "transformers", "--json")
    found = json.loads(asked_again.stdout)
    assert (found["k"], found["temperature"], found["n"], found["not_held_out"]) == (4, 1.0, 48, 0)
    assert "12 questions, 4 answers to each" in asked_again.stderr and "12 of 12 questions answered" in asked_again.stderr
    versions = [line["policy_version"] for line in _lines(tmp_path, "eval_sets.jsonl")]
    assert versions[: len(first)] == [line["policy_version"] for line in first]
    assert versions == sorted(set(versions)) and versions[-1] == 7, "no version twice, and the last one again"

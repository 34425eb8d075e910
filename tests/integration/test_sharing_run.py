"""`swarm experiment sharing` in a folder of `swarm new`: real nodes, stopped once and continued."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "models" / "base"
STEPS, LOCAL, ANSWERS = 2, 2, 8
ARMS, NODES, SEEDS = ("sharing", "own-replay"), ("alpha", "beta"), (1, 2)
COMMAND = ("experiment", "sharing", "--nodes", "2", "--seeds", "2", "--steps", str(STEPS))
DEADLINE_S = 900.0
REWARD = '''"""Pays short answers, which some of a group are."""


def accuracy(completions, answer, **columns):
    return [float(len(text) % 2) for text in completions]
'''


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    return subprocess.Popen(
        [sys.executable, "-m", "swarm_cli", *arguments],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = _start(folder, *arguments)
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in errors, errors
    return process.returncode, out, errors


def _processes_of(folder: Path) -> list[str]:
    """The running processes that were given a folder below this one."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SWARM_NODE__VAR_DIR={folder}".encode() in environment.read_bytes():
                found.append((environment.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_sharing_is_measured_with_a_users_own_rows_and_reward_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    rows = [{"question": f"What is {number} + 1?", "answer": number + 1} for number in range(80)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, errors = _ended(tmp_path, "new", "mine", "--model", str(MODEL), "--data", "questions.jsonl")
    assert code == 0, errors
    folder = tmp_path / "mine"
    written = (folder / "node.toml").read_text()
    lines = [line for line in written.splitlines() if not line.startswith(("max_new_tokens", "completions"))]
    text = "\n".join(lines).replace("[generator]", f"[generator]\nmax_new_tokens = 6\ncompletions = {ANSWERS}")
    verifier = next(line for line in lines if line.startswith("verifier"))
    (folder / "node.toml").write_text(text.replace(verifier, 'reward = "rewards.py:accuracy"'))
    (folder / "rewards.py").write_text(REWARD)
    out = folder / "var" / "sharing"

    # The cost is known before anything starts, and nothing starts without an answer.
    code, said, errors = _ended(folder, *COMMAND)
    assert code == 1 and not said, errors
    assert "--yes" in errors
    assert sorted(file.name for file in out.iterdir()) == ["experiment.json", "trial.json", "trial.log"]
    trial = (out / "trial.json").read_bytes()
    assert all(seconds > 0 for seconds in json.loads(trial).values())

    # Stopped in the second run: every process ends, and the first run stays.
    process = _start(folder, *COMMAND, "--yes")
    second, give_up_at = out / "running" / "runs" / "own-replay-1" / "alpha", time.monotonic() + DEADLINE_S
    while not second.is_dir() and process.poll() is None and time.monotonic() < give_up_at:
        time.sleep(0.1)
    assert second.is_dir()
    assert _processes_of(out), "how processes are found"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert _processes_of(out) == []
    first = out / "sharing" / "seed-1" / "done.json"
    before = first.stat().st_mtime_ns
    assert not (out / "own-replay" / "seed-1" / "done.json").exists()

    code, said, errors = _ended(folder, *COMMAND, "--yes")
    assert code == 0, errors
    assert "[1/3] own replay, seed 1" in errors
    assert first.stat().st_mtime_ns == before
    assert (out / "trial.json").read_bytes() == trial, "the cost is measured once"
    assert not (out / "running").exists(), "checkpoints are not kept"

    # The difference is that of the raw records, from as many completions in both arms.
    ends: dict[tuple[str, int], float] = {}
    for arm in ARMS:
        for seed in SEEDS:
            records = [out / arm / f"seed-{seed}" / node for node in NODES]
            for steps in (_lines(record / "metrics.jsonl") for record in records):
                assert [(line["step"], line["groups_local"]) for line in steps] == [(1, LOCAL), (2, LOCAL)]
                assert arm == "sharing" or not any(line["groups_external"] for line in steps)
            asked = {line["held_out"] for record in records for line in _lines(record / "eval.jsonl")}
            last = [_lines(record / "eval.jsonl")[-1] for record in records]
            assert {line["policy_version"] for line in last} == {STEPS} and len(asked) == 1
            ends[arm, seed] = statistics.fmean(line["pass_rate"] for line in last)
    replayed = [line.get("groups_replayed", 0) for line in _lines(out / "own-replay" / "seed-1" / "alpha" / "metrics.jsonl")]
    assert replayed[0] == 0 and 0 < replayed[1] <= LOCAL
    shared = [line["groups_external"] for node in NODES for line in _lines(out / "sharing" / "seed-1" / node / "metrics.jsonl")]
    assert sum(shared) > 0, "the nodes begin together, whichever has loaded its model first"
    gains = [ends["sharing", seed] - ends["own-replay", seed] for seed in SEEDS]
    assert "| 2 | " in said and f"{round(gains[1], 3) + 0.0:+.3f} |" in said
    assert said.startswith(f"Sharing: {round(statistics.fmean(gains), 2) + 0.0:+.2f} held-out (95 %: ")
    report = (out / "report.md").read_text()
    assert said.splitlines()[0] in report
    assert f"{STEPS * LOCAL * ANSWERS} completions a node" in report
    assert (out / "sharing.png").read_bytes().startswith(b"\x89PNG")

    # Another experiment does not mix with it.
    code, _, errors = _ended(folder, *COMMAND, "--steps", "3", "--yes")
    assert code == 1 and "--out" in errors and "steps" in errors

"""`make gpu-check` on a machine without a GPU: it says so, and every part of it runs, small, on the
CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import PARTS, TARGET, part_environment
from benchmarks.gpu.setting import SUMS, Finding, joined, page
from tests.forked import Forked, run
from tests.forked_commands import Commands

DEADLINE_S = 300
REPO = Path(__file__).resolve().parents[2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Path]:
    """A `python` that has the command's parts forked: each would import for four seconds."""
    commands, program = Commands(tmp_path), tmp_path / "python"
    commands.program(tmp_path / "part", "benchmarks.gpu")
    program.write_text(f'#!/bin/sh\n[ "$1 $2" = "-m benchmarks.gpu" ] && shift 2 && exec {tmp_path / "part"} "$@"\nexit 99\n')
    program.chmod(0o755)
    yield program
    commands.close()


def gpu_check(python: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    asked = [str(python), "benchmarks.gpu", *arguments]
    return run("tests.integration.with_python", asked, environment=os.environ | NO_GPU, cwd=REPO, timeout=DEADLINE_S)


def written() -> bytes | None:
    return TARGET.read_bytes() if TARGET.exists() else None


def test_without_a_gpu_it_says_so_and_leaves_the_page_alone() -> None:
    before = written()
    done = gpu_check(sys.executable)
    assert done.returncode == 0, done.stderr
    assert "no GPU here" in done.stdout and "nothing was checked" in done.stdout
    assert written() == before


def test_the_command_runs_a_part_and_prints_what_it_finds(python: Path) -> None:
    before = written()
    done = gpu_check(python, "resume", "--device", "cpu", "--short")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": " in done.stdout.split("so far)", 1)[1], "a finding"
    assert "NOT KEPT" not in done.stdout and "failed" not in done.stdout
    assert written() == before, "the CPU is not what the page is about"


@pytest.mark.parametrize("part", [pytest.param(part, marks=pytest.mark.long) if part == "learning" else part for part in PARTS])
def test_every_part_runs_on_the_cpu_and_keeps_its_bars(part: str, tmp_path: Path) -> None:
    """Each as the command runs it, in a process of its own. The one that trains a policy until it
    has learnt takes as long as all others together, and every other test of a swarm trains.
    """
    into, log = tmp_path / "found.json", tmp_path / "log"
    asked = [part, "--device", "cpu", "--short", "--into", str(into), "--folder", str(tmp_path)]
    process = Forked("benchmarks.gpu", asked, environment=os.environ | part_environment() | NO_GPU, cwd=REPO, log=log)
    try:
        code = process.wait(DEADLINE_S)
    finally:
        process.kill()
    assert code == 0, log.read_text()
    findings = [Finding(**each) for each in json.loads(into.read_text())]
    assert findings and not [each for each in findings if each.held is False]


def test_a_part_that_cannot_run_is_a_failure_with_its_cause(python: Path, tmp_path: Path) -> None:
    done = gpu_check(python, "resume", "--device", "cpu", "--short", "--model", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "failed: ended with code 1" in done.stdout and "nothing" in done.stdout


def test_a_model_file_in_parts_that_do_not_make_it_is_refused(tmp_path: Path) -> None:
    parts, into = tmp_path / "parts", tmp_path / "into"
    parts.mkdir()
    into.mkdir()
    (parts / SUMS).write_text(f"{hashlib.sha256(b'one two').hexdigest()}  m.gguf\n")
    (parts / "m.gguf.part-00").write_bytes(b"one ")
    with pytest.raises(ValueError, match="4 bytes"):
        joined(parts, into)


def test_the_page_counts_bars_and_names_what_failed() -> None:
    kept, missed, figure = (
        Finding(part="resume", measured="weights", found="the same bits", bar="the same bits", held=True),
        Finding(part="speed", measured="tokens", found="0.50", bar="at least 1", held=False),
        Finding(part="publish", measured="seconds", found="1.2"),
    )
    text = page(
        [kept, missed, figure], {"parity": "not done within 120 s"}, {"GPU": "one"}, date="2026-01-01", command="it", seconds=9
    )
    assert "1 of 2 bars kept, 1 parts not run to their end" in text
    assert "| speed | tokens | 0.50 | at least 1 | **not kept** |" in text
    assert "| parity | not run to its end | not done within 120 s | | **failed** |" in text

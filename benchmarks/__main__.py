"""`python -m benchmarks [row ...]`: measure, print the table, and write it to `var/bench.md`."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import Result, say
from benchmarks.table import markdown
from lab.runs import code_commit

# name: (module with `measure_<name>`, deadline in seconds)
ROWS = {
    "generator-vllm": ("benchmarks.generator", 240),
    "generator-transformers": ("benchmarks.generator", 180),
    "trainer-loop": ("benchmarks.trainer", 180),
    "trainer-trl": ("benchmarks.trainer", 240),
    "trainer-head": ("benchmarks.memory", 300),
    "trainer-memory": ("benchmarks.memory", 600),
    "trainer-memory-long": ("benchmarks.memory", 600),
    "trainer-memory-vocabulary": ("benchmarks.memory", 600),
    "trainer-memory-width": ("benchmarks.memory", 600),
    "verifier-scoring": ("benchmarks.verifier", 120),
    "verifier-scoring-one": ("benchmarks.verifier", 120),
    "verifier-service": ("benchmarks.verifier", 180),
    "verifier-turns": ("benchmarks.turns", 400),
    "policy-small": ("benchmarks.policy", 120),
    "policy-60mb": ("benchmarks.policy", 180),
    "policy-delta": ("benchmarks.policy", 240),
    "waiting": ("benchmarks.waiting", 300),
    "reading": ("benchmarks.reading", 500),
    "reading-alone": ("benchmarks.reading", 240),
}
TARGET = Path("var/bench.md")


def main() -> int:
    """Measure the requested rows. Exit code 0 if all could be measured, whether or not their bars
    are met.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"all by default: {', '.join(ROWS)}")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [row for row in arguments.rows if row not in ROWS]
    if unknown:
        parser.error(f"no row {unknown[0]}: rows are {', '.join(ROWS)}")
    if arguments.into:
        measure_here(arguments.rows[0], arguments.into)
    return measure_all(arguments.rows or list(ROWS))


def measure_here(row: str, into: Path) -> None:
    """Measure one row in this process and write its result as JSON."""
    module = importlib.import_module(ROWS[row][0])
    result: Result = asyncio.run(getattr(module, "measure_" + row.replace("-", "_"))())
    into.write_text(json.dumps(result.to_builtins()))
    sys.stdout.flush()
    # Tearing down torch and vLLM takes seconds and can fail, and the result is already written.
    os._exit(0)


def measure_all(rows: list[str]) -> int:
    """Measure rows one after another, each in its own process."""
    commit, started = code_commit(), time.monotonic()
    results: list[Result] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows, start=1):
            say(f"[{number}/{len(rows)}] {row} ({time.monotonic() - started:.0f} s so far)")
            into = Path(folder) / f"{row}.json"
            cause = _in_own_process(row, into)
            if cause is None:
                results.append(Result(**json.loads(into.read_text())))
            else:
                failures[row] = cause
                say(f"not measured: {cause}")
    text = markdown(results, failures, commit)
    print(text)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text)
    return 1 if failures else 0


def _in_own_process(row: str, into: Path) -> str | None:
    deadline_s = ROWS[row][1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", row, "--into", str(into)], env=environment, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done within {deadline_s} s"
    return None if done.returncode == 0 and into.exists() else f"its process ended with code {done.returncode}, see above"


if __name__ == "__main__":
    sys.exit(main())

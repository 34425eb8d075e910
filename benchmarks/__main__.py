"""`python -m benchmarks [row ...]`: measure, print the table, write `docs/benchmarks.md`."""

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

from rich.console import Console

from benchmarks.measuring import Result
from benchmarks.table import machine, markdown, print_table, with_notes_of
from lab.runs import code_commit

# name: (module with `measure_<name>`, deadline in seconds)
ROWS = {
    "generator-vllm": ("benchmarks.generator", 240),
    "generator-transformers": ("benchmarks.generator", 180),
    "trainer-loop": ("benchmarks.trainer", 180),
    "trainer-trl": ("benchmarks.trainer_trl", 240),
    "trainer-head": ("benchmarks.head", 300),
    "trainer-memory": ("benchmarks.step_memory", 600),
    "trainer-memory-long": ("benchmarks.step_memory", 600),
    "trainer-memory-vocabulary": ("benchmarks.step_memory", 600),
    "trainer-memory-width": ("benchmarks.step_memory", 600),
    "verifier-scoring": ("benchmarks.verifier", 120),
    "verifier-scoring-one": ("benchmarks.verifier", 120),
    "verifier-service": ("benchmarks.verifier", 180),
    "policy-small": ("benchmarks.policy", 120),
    "policy-60mb": ("benchmarks.policy", 180),
    "policy-delta": ("benchmarks.policy", 240),
    "policy-delta-link": ("benchmarks.policy", 600),
    "waiting": ("benchmarks.waiting", 300),
    "commands": ("benchmarks.commands", 300),
    "page": ("benchmarks.page", 300),
}
TARGET = Path("docs/benchmarks.md")


def main() -> int:
    """Measure the requested rows. Exit code 0 if all could be measured, whether or not their bars
    are met.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"all by default: {', '.join(ROWS)}")
    parser.add_argument("--no-write", action="store_true", help=f"leave {TARGET} alone")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [row for row in arguments.rows if row not in ROWS]
    if unknown:
        parser.error(f"no row {unknown[0]}: rows are {', '.join(ROWS)}")
    if arguments.into:
        measure_here(arguments.rows[0], arguments.into)
        return 0
    return measure_all(arguments.rows or list(ROWS), write=not arguments.no_write and not arguments.rows)


def measure_here(row: str, into: Path) -> None:
    """Measure one row in this process and write its result as JSON."""
    module = importlib.import_module(ROWS[row][0])
    result: Result = asyncio.run(getattr(module, "measure_" + row.replace("-", "_"))())
    into.write_text(json.dumps(result.to_builtins()))
    sys.stdout.flush()
    # Tearing down torch and vLLM takes seconds and can fail, and the result is already written.
    os._exit(0)


def measure_all(rows: list[str], *, write: bool) -> int:
    """Measure rows one after another, each in its own process."""
    console = Console(stderr=True)
    facts, commit = machine(), code_commit()
    started = time.monotonic()
    results: list[Result] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows, start=1):
            console.print(f"[{number}/{len(rows)}] {row} ({time.monotonic() - started:.0f} s so far)", markup=False)
            into = Path(folder) / f"{row}.json"
            cause = _in_own_process(row, into)
            if cause is None:
                results.append(Result(**json.loads(into.read_text())))
            else:
                failures[row] = cause
                console.print(f"    not measured: {cause}", markup=False)
    seconds = time.monotonic() - started
    print_table(results, failures, Console(width=max(140, Console().width)))
    if write:
        run = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "command": "python -m benchmarks"}
        text = markdown(results, failures, facts, **run, seconds=seconds)
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(with_notes_of(TARGET.read_text() if TARGET.exists() else "", text))
        console.print(f"written to {TARGET} after {seconds:.0f} s")
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

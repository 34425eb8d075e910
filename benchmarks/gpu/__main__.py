"""Runs the parts, each in its own process with a deadline, prints their findings and writes
`var/gpu-check.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.setting import Finding, Setting, page
from benchmarks.table import machine

PARTS = {
    "parity": ("benchmarks.gpu.parity", "check", 300),
    "resume": ("benchmarks.gpu.training", "check_resume", 60),
    "sharded": ("benchmarks.gpu.training", "check_sharded", 60),
    "speed": ("benchmarks.gpu.training", "check_speed", 120),
    "sharing": ("benchmarks.gpu.training", "check_sharing", 240),
    "deltas": ("benchmarks.gpu.training", "check_deltas", 60),
    "publish": ("benchmarks.gpu.training", "check_publish", 60),
    "turns": ("benchmarks.gpu.turns", "check", 200),
    "learning": ("benchmarks.gpu.learning", "check", 300),
}
"""Name: module, function, deadline in seconds on a GPU."""
CPU_PATIENCE = 4
"""A trial of the check itself on a CPU, which may be busy, gets so many times the deadline."""
TARGET = Path("var/gpu-check.md")


def main() -> int:
    """Exit code 0 if every part ran to its end, whether or not its bars were met, or if there is no
    GPU.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"all by default: {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1; cpu tries the check itself and writes nothing")
    parser.add_argument(
        "--model",
        default="",
        help="a model folder, or one of the parts of a GGUF file (benchmarks/gpu/setting.py), instead of random weights",
    )
    parser.add_argument("--short", action="store_true", help="a tiny model, seconds instead of minutes; writes nothing")
    parser.add_argument("--no-write", action="store_true", help=f"leave {TARGET} alone")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}: parts are {', '.join(PARTS)}")
    if arguments.into is not None:
        _run_here(arguments)
        return 0
    if arguments.device.startswith("cuda") and (found := _no_gpu()):
        print(f"{found}: nothing was checked, and {TARGET} is unchanged")
        return 0
    return _run_all(arguments)


def _no_gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    built = f"torch {torch.__version__} is a build without CUDA" if torch.version.cuda is None else "torch finds no GPU"
    return f"no GPU here ({built})"


def _run_here(arguments: argparse.Namespace) -> None:
    module, function, _ = PARTS[arguments.parts[0]]
    setting = Setting(device=arguments.device, folder=arguments.folder, model=arguments.model, short=arguments.short)
    made = getattr(importlib.import_module(module), function)(setting)
    findings: list[Finding] = asyncio.run(made) if inspect.iscoroutine(made) else made
    arguments.into.write_text(json.dumps([finding.to_builtins() for finding in findings]))
    sys.stdout.flush()
    # Tearing down torch and vLLM takes seconds and can fail, and the findings are already written.
    os._exit(0)


def _run_all(arguments: argparse.Namespace) -> int:
    """Run the parts and return the exit code. A part that fails or hangs loses only its own
    findings. The page is written only after a complete run on a GPU, because the figures of a
    short, partial or CPU run would be misleading there.
    """
    started = time.monotonic()
    findings: list[Finding] = []
    failures: dict[str, str] = {}
    facts = _facts(arguments.device) | machine()
    with tempfile.TemporaryDirectory() as name:
        for part in arguments.parts or PARTS:
            print(f"{part} ({time.monotonic() - started:.0f} s so far)", flush=True)
            into = Path(name) / f"{part}.json"
            cause = _in_own_process(part, arguments, Path(name), into)
            if cause is None:
                new = [Finding(**each) for each in json.loads(into.read_text())]
                for finding in new:
                    verdict = {True: "kept", False: "NOT KEPT", None: ""}[finding.held]
                    print(f"    {finding.measured}: {finding.found}" + (f" (bar: {finding.bar}) {verdict}" if finding.bar else ""))
                findings += new
            else:
                failures[part] = cause
                print(f"    failed: {cause}")
    seconds = time.monotonic() - started
    if not (arguments.no_write or arguments.short or arguments.parts or arguments.device == "cpu"):
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(
            page(findings, failures, facts, date=time.strftime("%Y-%m-%d"), command="make gpu-check", seconds=seconds)
        )
        print(f"written to {TARGET} after {seconds:.0f} s")
    return 1 if failures else 0


def _facts(device: str) -> dict[str, str]:
    import torch

    if not device.startswith("cuda"):
        return {}
    found = torch.cuda.get_device_properties(device)
    return {"GPU": f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"}


def part_environment() -> dict[str, str]:
    """Environment variables for a part's process."""
    return {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def _in_own_process(part: str, arguments: argparse.Namespace, folder: Path, into: Path) -> str | None:
    deadline_s = PARTS[part][2] * (1 if arguments.device.startswith("cuda") else CPU_PATIENCE)
    command = [sys.executable, "-m", "benchmarks.gpu", part, "--device", arguments.device, "--into", str(into)]
    command += ["--folder", str(folder), "--model", arguments.model, *(["--short"] if arguments.short else [])]
    try:
        done = subprocess.run(
            command, env=os.environ | part_environment(), timeout=deadline_s, check=False, stderr=subprocess.PIPE, text=True
        )
    except subprocess.TimeoutExpired:
        return f"not done within {deadline_s} s"
    if done.returncode == 0 and into.exists():
        return None
    last = (done.stderr or "").strip().splitlines()[-1:] or ["nothing was said"]
    return f"ended with code {done.returncode}: {last[0][:300]}"


if __name__ == "__main__":
    sys.exit(main())

"""Trains the same model on the same rows with Swarm and with TRL, as a user of each would write it:

    python -m benchmarks.beside_trl var/models/smollm2 --steps 20 --seeds 1 --out var/beside-trl

Both get one folder with a rewards file that neither has to change, and make as many completions a
step: 4 questions with 8 answers of at most 24 tokens. Swarm is one node that shares nothing; TRL
never sees the questions that Swarm holds out. Both results are scored by `swarm eval`, greedily, on
these. Printed, and kept in OUT/results.json: held-out pass rate, seconds a step and in all, the
largest memory of all processes together, and lines of the user's own with one setting a line.

To be known when they are read: a step is timed from the end of one to the end of the next, without
the first, as a mean on both sides. Swarm samples while it trains, so that its completions are of
one or two versions ago, and computes nothing for a group whose rewards are all equal; TRL does one
after the other and computes all groups. Swarm's seconds in all hold two evaluations of the
held-out questions, TRL's none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import say
from benchmarks.waiting import descendants, free_ports
from shared.config import load_config
from shared.run_records import METRICS_FILE, read_jsonl
from shared.tasks import held_out_tasks
from shared.tasks.file_source import with_row_name

GROUPS, COMPLETIONS, NEW_TOKENS, RATE = 4, 8, 24, 1e-5
_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1}
TASKS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {**_DIGITS, "max_digits": 1, "operators": ["+", "-"], "allow_parentheses": False, "allow_negation": False},
    "products": {**_DIGITS, "max_digits": 1},
    "chain_sum": {**_DIGITS, "max_digits": 2},
}
"""The demo's (config/smollm2.toml)."""
ROWS_OF_A_TASK = 300
DEADLINE_S = 1500.0
_SAMPLE_S = 0.5

REWARDS = """\
import re


def accuracy(completions, answer, **columns):
    numbers = [re.findall(r"-?[0-9]+", completion[-1]["content"]) for completion in completions]
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer)]
"""
SWARM = """\
[model]
path = "{model}"

[generator]
completions = {completions}
max_new_tokens = {new_tokens}

[eval]
tasks = {held_out}
every_versions = {steps}

[sampler]
local = {groups}
external = 0

[trainer]
objective = "dapo"
learning_rate = {rate}
warmup_steps = 0

[[tasks]]
path = "questions.jsonl"
reward = "rewards.py:accuracy"
"""
TRL = """\
from datasets import load_dataset
from rewards import accuracy
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    "{model}",
    reward_funcs=accuracy,
    train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
    args=GRPOConfig(
        output_dir="checkpoints",
        model_init_kwargs={{"dtype": "float32"}},
        per_device_train_batch_size={batch},
        num_generations={completions},
        max_completion_length={new_tokens},
        learning_rate={rate},
        lr_scheduler_type="constant",
        max_steps={steps},
        seed={seed},
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
    ),
)
trainer.train()
trainer.save_model("trained")
"""
_RUN_TRL = (
    # TRL would import all of vLLM, where it is installed, for a generation that is not used here.
    "import runpy, sys; import trl.import_utils as found; found.is_vllm_available = lambda *_, **__: False; "
    "sys.path.insert(0, '.'); runpy.run_path('train.py', run_name='__main__')"
)


def write_rows(folder: Path) -> None:
    """Write the questions in the shape that both read: messages, and the answer as a text."""
    from reasoning_gym import create_dataset

    rows = {}
    for name, config in TASKS.items():
        for row in create_dataset(name, size=ROWS_OF_A_TASK, seed=7, **config):
            rows[row["question"]] = {"prompt": [{"role": "user", "content": row["question"]}], "answer": str(row["answer"])}
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


def write_files(folder: Path, model: Path, steps: int, asked: int, seed: int) -> dict[str, int]:
    """Write what a user of each would; returns the lines of their own, without empty ones."""
    values = {
        "model": model, "completions": COMPLETIONS, "new_tokens": NEW_TOKENS, "held_out": asked, "steps": steps,
        "groups": GROUPS, "rate": RATE, "batch": GROUPS * COMPLETIONS, "seed": seed,
    }  # fmt: skip
    files = {"rewards.py": REWARDS, "node.toml": SWARM.format(**values), "train.py": TRL.format(**values)}
    for name, text in files.items():
        (folder / name).write_text(text)
    lines = {name: sum(bool(line.strip()) for line in text.splitlines()) for name, text in files.items()}
    return {"Swarm": lines["node.toml"] + lines["rewards.py"], "TRL": lines["train.py"] + lines["rewards.py"]}


def hold_out(folder: Path, asked: int) -> None:
    """Write `train.jsonl`: the rows that the node does not hold out."""
    here = Path.cwd()
    try:
        os.chdir(folder)  # paths in node.toml are relative to it
        config = load_config(Path("node.toml"))
        held = {json.dumps(task.ref.index) for task in held_out_tasks([with_row_name(spec) for spec in config.tasks], asked)}
    finally:
        os.chdir(here)
    rows = (folder / "questions.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(row for number, row in enumerate(rows) if str(number) not in held))


def measured(command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Run a command to its end; returns its seconds, and the most memory in bytes that it and its
    descendants had together (shared pages are counted once).
    """
    started, most = time.monotonic(), 0
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        while process.poll() is None:
            if time.monotonic() - started > DEADLINE_S:
                process.terminate()
                process.wait(60)
                raise RuntimeError(f"{command}: not done within {DEADLINE_S:.0f} s, see {log}")
            most = max(most, sum(map(_memory_bytes, [process.pid, *descendants(process.pid)])))
            time.sleep(_SAMPLE_S)
    if process.returncode:
        raise RuntimeError(f"{command[:4]} ended with code {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
    return time.monotonic() - started, most


def _memory_bytes(process: int) -> int:
    try:
        found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def train_swarm(folder: Path, steps: int, seed: int) -> dict[str, float]:
    """Train one node; the policy is exported into `swarm-trained`."""
    program, run = [sys.executable, "-m", "swarm_cli"], f"beside-{seed}"
    ports = ["--nats-port", str(free_ports()), "--base-port", str(free_ports(10))]
    seconds, memory = measured(
        [*program, "up", "--steps", str(steps), "--run", run, *ports], folder, folder / "swarm.log", {"SWARM_NODE__SEED": str(seed)}
    )
    ends = [line["time"] for line in read_jsonl(folder / "var" / "runs" / run / "alpha" / METRICS_FILE)]
    step = (ends[-1] - ends[0]) / (len(ends) - 1)
    measured([*program, "model", "export", run, "alpha", "swarm-trained"], folder, folder / "export.log", {})
    return {"seconds": seconds, "seconds_a_step": step, "memory_bytes": memory, "held_out": held_out(folder, "swarm-trained")}


def train_trl(folder: Path, steps: int) -> dict[str, float]:
    """Run `train.py`, which leaves `trained`."""
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    seconds, memory = measured([sys.executable, "-c", _RUN_TRL], folder, folder / "trl.log", threads)
    times = [float(found) for found in re.findall(r"'step_time': '?([0-9.e-]+)", (folder / "trl.log").read_text(errors="replace"))]
    assert len(times) == steps, f"TRL logged the time of {len(times)} of {steps} steps"
    step = statistics.fmean(times[1:])
    return {"seconds": seconds, "seconds_a_step": step, "memory_bytes": memory, "held_out": held_out(folder, "trained")}


def held_out(folder: Path, model: str) -> float:
    """The pass rate of a model folder on the questions that neither side was trained on."""
    asked = [sys.executable, "-m", "swarm_cli", "eval", model, "--config", "node.toml", "--json"]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{model} was not scored: {done.stderr[-2000:]}")
    rate: float = json.loads(done.stdout)["pass_rate"]
    return rate


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown, means over seeds."""
    seeds = results["runs"]
    head = f"{results['steps']} steps of {GROUPS} x {COMPLETIONS} completions, mean of {len(seeds)}"
    lines = [f"| {head} | Swarm | TRL |", "|---|---|---|"]

    def row(title: str, figure: str, form: str, unit: float = 1.0) -> None:
        cells = (format(statistics.fmean(run[side][figure] for run in seeds) / unit, form) for side in ("Swarm", "TRL"))
        lines.append(f"| {title} | {' | '.join(cells)} |")

    row(f"held-out pass rate (base {results['base']:.3f})", "held_out", ".3f")
    row("seconds a step", "seconds_a_step", ".1f")
    row("seconds, start to end", "seconds", ".0f")
    row("largest memory, GB", "memory_bytes", ".2f", 1e9)
    lines.append(f"| lines of your own | {results['lines']['Swarm']} | {results['lines']['TRL']} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_trl", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder of the model, such as var/models/smollm2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--held-out", type=int, default=120, help="questions that neither side is trained on")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("var/beside-trl"))
    asked = parser.parse_args(arguments)
    out = asked.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    results: dict[str, Any] = {"model": str(asked.model), "steps": asked.steps, "runs": []}
    for seed in range(1, asked.seeds + 1):
        folder = out / f"seed-{seed}"
        folder.mkdir()
        write_rows(folder)
        results["lines"] = write_files(folder, asked.model.absolute(), asked.steps, asked.held_out, seed)
        hold_out(folder, asked.held_out)
        results.setdefault("base", held_out(folder, str(asked.model.absolute())))
        # In turns, so that a machine that slows down favours neither.
        sides = {"Swarm": lambda: train_swarm(folder, asked.steps, seed), "TRL": lambda: train_trl(folder, asked.steps)}  # noqa: B023
        run = {}
        for side in list(sides) if seed % 2 else list(sides)[::-1]:
            say(f"seed {seed}: {side}")
            run[side] = sides[side]()
            say(f"seed {seed}: {side}: {run[side]}")
        results["runs"].append(run)
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

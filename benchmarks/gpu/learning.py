"""Trains a policy with the services as a user starts them: `swarm up` with four nodes that share
one GPU and their rollouts, three minutes after the base policy was measured.
"""

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

from benchmarks.gpu.setting import Finding, Setting, small_model
from benchmarks.waiting import free_ports
from services.generator.engines import has_cuda_vllm
from swarm_cli.installation import DEMO_CONFIG, shown

_NODES, _SHORT_NODES, _SHORT_STEPS = 4, 2, 2
_START_S, _LEARN_S, _END_S = 60.0, 180.0, 40.0
"""Until every node has measured the base policy, at most; of learning; and to stop."""
_RUN = "gpu-check"
_CONFIG = "config/smollm2.toml"


def check(setting: Setting) -> list[Finding]:
    """Held-out pass rate of each node before and after, with config/smollm2.toml and the model of
    `--model` (or var/models/smollm2), else with the first demo.
    """
    model = _real_model(setting)
    demo = _CONFIG if model else str(shown(DEMO_CONFIG))
    nodes = _SHORT_NODES if setting.short else _NODES
    on_gpu = setting.device.startswith("cuda")
    engine = "vllm" if on_gpu and has_cuda_vllm() else "transformers"
    environment = os.environ | {
        "SWARM_MODEL__DEVICE": setting.device,
        "SWARM_NODE__VAR_DIR": str(setting.folder / "var"),
        "SWARM_GENERATOR__ENGINE": engine,
        "SWARM_GENERATOR__GPU_MEMORY_FRACTION": f"{0.4 / nodes:.2f}",
        "SWARM_EVAL__EVERY_VERSIONS": "2" if setting.short else "20",
    }
    if model:
        environment["SWARM_MODEL__PATH"] = str(model)
    command = [sys.executable, "-m", "swarm_cli", "up", "--nodes", str(nodes), "--config", demo, "--run", _RUN]
    command += ["--nats-port", str(free_ports()), "--base-port", str(free_ports(4 * nodes))]  # beside another swarm too
    if setting.short:
        command += ["--steps", str(_SHORT_STEPS)]
    started = time.monotonic()
    with (setting.folder / "up.log").open("wb") as log:
        swarm = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            while swarm.poll() is None and time.monotonic() - started < _START_S and len(_records(setting, "eval.jsonl")) < nodes:
                time.sleep(0.5)
            swarm.wait(None if setting.short else _LEARN_S)
        except subprocess.TimeoutExpired:
            swarm.send_signal(signal.SIGINT)
            swarm.wait(_END_S)
        finally:
            swarm.kill()
    seconds = time.monotonic() - started
    evaluations = _records(setting, "eval.jsonl")
    if not evaluations:
        tail = (setting.folder / "up.log").read_text(errors="replace")[-600:]
        raise RuntimeError(f"`swarm up` evaluated nothing in {seconds:.0f} s: {tail}")
    steps = _records(setting, "metrics.jsonl")
    measured = f"`swarm up --nodes {nodes}` with {model.name if model else 'the demo'}, {engine}, {seconds:.0f} s"
    gains = [rates[-1]["pass_rate"] - rates[0]["pass_rate"] for rates in evaluations.values()]
    said = "; ".join(f"{node} {_said(rates[0])}, then {_said(rates[-1])}" for node, rates in sorted(evaluations.items()))
    taken = {node: sum(step["groups_external"] for step in made) for node, made in steps.items()}
    return [
        Finding(
            part="learning",
            measured=f"{measured}: held-out pass rate",
            found=f"{said}; mean gain {statistics.mean(gains):+.3f}",
            bar="higher",
            held=None if setting.short else statistics.mean(gains) > 0.0,
        ),
        Finding(
            part="learning",
            measured=f"{measured}: steps, and groups trained on that other nodes sent",
            found="; ".join(f"{node} {len(made)}, {taken[node]}" for node, made in sorted(steps.items())),
            bar="some, at each node",
            held=None if setting.short else len(steps) == nodes and all(taken.values()),
        ),
    ]


def _real_model(setting: Setting) -> Path | None:
    """The pretrained model, as requested or where the demo looks for it."""
    if setting.model:
        return small_model(setting)[1]
    found = Path("var/models/smollm2")
    return found if (found / "config.json").exists() and not setting.short else None


def _records(setting: Setting, file: str) -> dict[str, list[dict[str, Any]]]:
    """The lines of each node's `file`, by node; a line that is being written is left out."""
    found = {}
    for path in (setting.folder / "var").rglob(file):
        if lines := [json.loads(line) for line in path.read_text().split("\n")[:-1]]:
            found[path.parent.name] = lines
    return found


def _said(evaluation: dict[str, Any]) -> str:
    return f"{evaluation['pass_rate']:.3f} at version {evaluation['policy_version']}"

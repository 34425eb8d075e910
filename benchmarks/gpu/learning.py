"""Trains one node with the services as a user starts them: five minutes of `swarm up` on the
GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Finding, Setting
from benchmarks.waiting import free_ports
from services.generator.engines import has_cuda_vllm
from swarm_cli.installation import DEMO_CONFIG, shown

_SECONDS, _SHORT_STEPS = 300.0, 2
_END_S = 60.0


def check(setting: Setting) -> list[Finding]:
    """Held-out pass rate before and after, with config/smollm2.toml if its model is there, else
    with the first demo.
    """
    real = Path("var/models/smollm2/config.json").exists() and not setting.short
    demo = "config/smollm2.toml" if real else str(shown(DEMO_CONFIG))
    engine = "vllm" if setting.device.startswith("cuda") and has_cuda_vllm() else "transformers"
    environment = os.environ | {
        "SWARM_MODEL__DEVICE": setting.device,
        "SWARM_NODE__VAR_DIR": str(setting.folder / "var"),
        "SWARM_GENERATOR__ENGINE": engine,
        "SWARM_EVAL__EVERY_VERSIONS": "2" if setting.short else "20",
    }
    command = [sys.executable, "-m", "swarm_cli", "up", "--nodes", "1", "--config", demo, "--run", "gpu-check"]
    command += ["--nats-port", str(free_ports()), "--base-port", str(free_ports(4))]  # beside another swarm too
    if setting.short:
        command += ["--steps", str(_SHORT_STEPS)]
    started = time.monotonic()
    with (setting.folder / "up.log").open("wb") as log:
        swarm = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            swarm.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            swarm.send_signal(signal.SIGINT)
            swarm.wait(_END_S)
    seconds = time.monotonic() - started
    files = sorted((setting.folder / "var").rglob("eval.jsonl"))
    rates = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    if not rates:
        tail = (setting.folder / "up.log").read_text(errors="replace")[-600:]
        raise RuntimeError(f"`swarm up` evaluated nothing in {seconds:.0f} s: {tail}")
    first, last = rates[0], rates[-1]
    return [
        Finding(
            part="learning",
            measured=f"`swarm up --nodes 1 --config {demo}`, {engine}, {seconds:.0f} s: held-out pass rate",
            found=f"{_said(first)}, then {_said(last)}",
            bar="higher",
            held=None if setting.short else last["pass_rate"] > first["pass_rate"],
        )
    ]


def _said(evaluation: dict[str, Any]) -> str:
    return f"{evaluation['pass_rate']:.3f} at version {evaluation['policy_version']}"

"""Compares policies sent as deltas with full copies through the same server, on one machine and
over a slow link.

The link is the loopback of a network namespace, shaped to 100 Mbit/s; server, trainer and generator
are all in it. That takes root.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Result, in_turns, quotients
from benchmarks.policy import TrainerToGenerator, disk_folder
from benchmarks.shapes import SMOLLM2_135M
from benchmarks.table import median_of
from benchmarks.workload import node_config, node_plane, running_server

_CHANGED = 0.01
_LINK_MBIT = 100
_PAIRS = "BENCH_PAIRS"


async def measure_policy_delta() -> Result:
    """With a policy of SmolLM2-135M's size in bfloat16."""
    pairs = int(os.environ.get(_PAIRS, "7"))
    with tempfile.TemporaryDirectory(dir=disk_folder()) as name:
        folder = Path(name)
        model = _model_of_135m(folder)
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(running_server(folder))
            ways = []
            for node, anchor_every in (("deltas", 100), ("full", 1)):
                config = node_config(
                    folder,
                    server.url,
                    node={"id": node, "run": node, "var_dir": str(folder)},
                    model={"path": str(model)},
                    policy_store={"uri": "nats://", "anchor_every": anchor_every},
                )
                trainer_side = await stack.enter_async_context(node_plane(config, "trainer"))
                generator_side = await stack.enter_async_context(node_plane(config, "generator"))
                torch.set_num_threads(1)
                way = TrainerToGenerator(config, trainer_side, generator_side, dtype=torch.bfloat16, train=_train)
                stack.push_async_callback(way.close)
                await way.start()
                ways.append(way)
            deltas, full = ways
            size_mb = len(full.policy_bytes()) / 1e6
            # A trainer's first policy is a full copy either way.
            ours, theirs = await in_turns(
                lambda turn: deltas.turn(turn + 1), lambda turn: full.turn(turn + 1), pairs=pairs, warm_up=2
            )
    return Result(
        row="policy-delta",
        measured="seconds from `Publisher.publish` to the first token of the new policy (transformers engine), "
        "as a delta by nats://",
        against="as a full copy by nats://",
        workload=f"a random policy of {size_mb:.0f} MB (bfloat16, shapes of SmolLM2-135M), the last bit of one weight in a hundred "
        f"flipped every turn, more than a step at learning rate 1e-6 changes; {pairs} pairs",
        unit="s",
        ratios=quotients(ours, theirs),
        bar=1.0,
        direction="at most",
        product=median_of(ours),
        plain=median_of(theirs),
        remarks=["both sides write, hash and load 270 MB; the delta leaves out sending them and adds comparing and copying them"],
    )


async def measure_policy_delta_link() -> Result:
    """The same over a network of 100 Mbit/s."""
    namespace = f"swarm-bench-{os.getpid()}"

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    def measured() -> Any:
        run("ip", "netns", "add", namespace)
        try:
            run("ip", "-n", namespace, "link", "set", "lo", "up")
            shape = ["root", "tbf", "rate", f"{_LINK_MBIT}mbit", "burst", "128kb", "latency", "200ms"]
            run("tc", "-n", namespace, "qdisc", "add", "dev", "lo", *shape)
            with tempfile.TemporaryDirectory() as folder:
                into = Path(folder) / "result.json"
                row = [sys.executable, "-m", "benchmarks", "policy-delta", "--into", str(into)]
                environment = {**os.environ, _PAIRS: "3"}
                subprocess.run(["ip", "netns", "exec", namespace, *row], check=True, env=environment)
                return json.loads(into.read_text())
        finally:
            run("ip", "netns", "delete", namespace)

    found = await asyncio.to_thread(measured)
    found["row"] = "policy-delta-link"
    found["workload"] += f"; server, trainer and generator joined by {_LINK_MBIT} Mbit/s"
    return Result(**found)


@torch.no_grad()
def _train(model: Any) -> None:
    for parameter in model.parameters():
        bits = parameter.view(torch.int16)
        bits ^= (torch.rand(bits.shape) < _CHANGED).to(torch.int16)


def _model_of_135m(folder: Path) -> Path:
    """A model with SmolLM2-135M's shapes and dtype, because a delta's size depends on both. Its
    weights are random, so that nothing need be downloaded.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.engines.tiny_models import END_TOKEN_ID, PAD_TOKEN_ID, write_model_folder

    torch.manual_seed(0)
    config = LlamaConfig(
        **SMOLLM2_135M,
        max_position_embeddings=2048,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        dtype="bfloat16",
    )
    return write_model_folder(folder / "model", LlamaForCausalLM(config).to(torch.bfloat16).eval())

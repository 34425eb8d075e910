"""Measures the time from the trainer's weights on the GPU to the first token of a generator on it,
through a real server.
"""

from __future__ import annotations

import statistics

import torch

from benchmarks.gpu.finding import Finding, Setting
from benchmarks.gpu.models import small_model
from benchmarks.policy import TrainerToGenerator
from benchmarks.workload import node_config, node_plane, running_server


@torch.no_grad()
def _train(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter += 1e-3 * (torch.rand_like(parameter) < 0.01)


async def check(setting: Setting) -> list[Finding]:
    """Seconds from `Publisher.publish`, as deltas by nats://, after two warm-up policies."""
    name, folder = small_model(setting)
    async with running_server(setting.folder) as server:
        config = node_config(
            setting.folder,
            server.url,
            model={"path": str(folder), "device": setting.device, "dtype": "bfloat16"},
            policy_store={"uri": "nats://", "anchor_every": 16},
        )
        async with node_plane(config, "trainer") as trainer_side, node_plane(config, "generator") as generator_side:
            way = TrainerToGenerator(config, trainer_side, generator_side, dtype=torch.bfloat16, train=_train)
            await way.start()
            try:
                seconds = [await way.turn(turn) for turn in range(1, 4 if setting.short else 8)][2:]
            finally:
                await way.close()
    return [
        Finding(
            part="publish",
            measured=f"{name}, {len(way.policy_bytes()) / 1e6:,.0f} MB: seconds from publishing to the first token (transformers)",
            found=f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}, n={len(seconds)})",
        )
    ]

"""Checks engines that share a device with the trainer (`model.device_turns`): how much memory they
release between calls, and that they answer the same afterwards.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import torch

from benchmarks.gpu.setting import Finding, Setting, small_model
from services.generator.engines import Engine, SamplingParams, create_engine, has_cuda_vllm
from shared.device_turns import DeviceTurns

_PROMPTS = [[5 + place, 7, 11, 13] for place in range(8)]


async def check(setting: Setting) -> list[Finding]:
    """The transformers engine always, and vLLM if its CUDA build is installed."""
    name, folder = small_model(setting)
    kinds: list[str] = ["transformers"]
    if setting.device.startswith("cuda") and has_cuda_vllm():
        kinds.append("vllm")
    return [finding for kind in kinds for finding in await _engine_findings(kind, setting, name, folder)]


async def _engine_findings(kind: str, setting: Setting, name: str, folder: Path) -> list[Finding]:
    """Memory is read while another process has the turn and while the engine works; only the
    difference shows how much resting releases. After resting, the engine must give the same tokens,
    because an engine with wrongly restored weights still answers.
    """
    turns = DeviceTurns(setting.folder / f"{kind}.turns", "generator")
    other = DeviceTurns(setting.folder / f"{kind}.turns", "trainer")
    engine = create_engine(
        kind, str(folder), device=setting.device, dtype="float32", gpu_memory_utilization=0.3, turns=turns, start_timeout_s=100
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=8)
    try:
        async with engine.turn():
            await engine.start()
        async with engine.turn():
            before = await engine.generate(_PROMPTS, 1, params, seed=0)
        async with other.turn():
            resting = _used(setting.device)
        peak = await _used_at_work(engine, setting.device)
        started = time.monotonic()
        async with engine.turn():
            after = await engine.generate(_PROMPTS, 1, params, seed=0)
        seconds = time.monotonic() - started
    finally:
        await engine.close()
    same = [[each.token_ids for each in samples] for samples in before] == [
        [each.token_ids for each in samples] for samples in after
    ]
    found = [
        Finding(
            part="turns",
            measured=f"{name}, {kind}: greedy tokens before and after resting",
            found="the same" if same else "others",
            bar="the same",
            held=same,
        ),
        Finding(
            part="turns",
            measured=f"{name}, {kind}: a turn of 8 short answers, waking and resting included",
            found=f"{seconds:.2f} s",
        ),
    ]
    if setting.device.startswith("cuda"):
        measured = f"{name}, {kind}: GB of the device in use while it answers, and while another has its turn"
        rests = kind == "vllm"  # the engine transformers only gives back what torch keeps in store
        found.append(
            Finding(
                part="turns",
                measured=measured,
                found=f"{peak / 1e9:.2f}, {resting / 1e9:.2f}",
                bar="less" if rests else "",
                held=resting < peak if rests else None,
            )
        )
    return found


async def _used_at_work(engine: Engine, device: str) -> int:
    peak = 0
    async with engine.turn():
        working = asyncio.create_task(engine.generate(_PROMPTS * 16, 4, SamplingParams(max_new_tokens=64), seed=1))
        while not working.done():
            peak = max(peak, _used(device))
            await asyncio.sleep(0.01)
        await working
    return peak


def _used(device: str) -> int:
    """Bytes of the device in use by all processes; 0 if it is not a CUDA device."""
    if not device.startswith("cuda"):
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free

"""Checks the trainer on the GPU: speed and memory compared with a bare loop, a resume, a group of
processes with NCCL and FSDP2, deltas.
"""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import step_positions
from benchmarks.gpu.setting import Finding, Setting, config_for, random_model, small_model
from benchmarks.measuring import quotients
from benchmarks.policy import TrainerToGenerator
from benchmarks.trainer import BareLoop, completion_tokens
from benchmarks.workload import node_config, node_plane, random_batch, running_server
from services.trainer.checkpoint import CheckpointStore, PolicyVersion, TrainedModel
from services.trainer.learner import Learner
from services.trainer.selection.intake import take_in
from services.trainer.torchrun import Place, Sharded, join
from shared.config import NodeConfig
from shared.contracts.messages import Batch
from shared.model.weights import write_tensors
from shared.policy_store.chain import write_delta

_PROMPT, _ANSWERS = 60, (8, 32)
_DELTA_BARS = {1e-6: 50, 1e-5: 14}


def batches(learner: Learner, count: int, groups: int = 8) -> list[Batch]:
    """Groups of 8 answers of random tokens."""
    return [
        random_batch(
            number,
            groups=groups,
            completions=8,
            prompt_tokens=_PROMPT,
            completion_tokens=_ANSWERS,
            vocabulary=min(1000, learner.rules.vocabulary_size),
            tokenizer_hash=learner.rules.tokenizer_hash,
            end_token_id=learner.rules.end_token_id or 0,
        )
        for number in range(1, count + 1)
    ]


def check_speed(setting: Setting) -> list[Finding]:
    """`Learner.step` in bfloat16, compared with a bare loop on the same batches, in tokens per
    second and in memory.
    """
    models = [small_model(setting)] + ([] if setting.short else [random_model(setting, "0.5B")])
    return [finding for name, folder in models for finding in _speed(setting, name, folder)]


def _speed(setting: Setting, name: str, folder: Path) -> list[Finding]:
    steps, turns = (1, 1) if setting.short else (3, 5)
    config = config_for(setting, folder, dtype="bfloat16", trainer={"token_budget": 16_384, "objective": "dapo"})
    learner = Learner(config)
    made = batches(learner, steps)
    tokens = sum(map(completion_tokens, made))
    vocabulary = learner.rules.vocabulary_size
    ours, our_peak = _timed(setting, partial(_steps, learner, made), tokens, turns)
    sequences = [take_in(batch, learner.rules).groups for batch in made]
    # Its memory must be free before the other side's peak is measured.
    del learner
    bare = BareLoop(config, pad_token_id=0)
    rows = [bare.tensors(groups) for groups in sequences]
    theirs, their_peak = _timed(setting, partial(bare.steps, rows), tokens, turns)
    ratio = statistics.median(ours) / statistics.median(theirs)
    found = [
        Finding(
            part="speed",
            measured=f"trainer, {name}, bfloat16, completion tokens/s of a step of 64 answers over a bare loop's",
            found=f"{ratio:.2f} ({statistics.median(ours):,.0f} over {statistics.median(theirs):,.0f})",
            bar="at least 1",
            held=None if setting.short else ratio >= 1.0,
        )
    ]
    if our_peak:
        found.append(
            Finding(
                part="memory",
                measured=f"trainer, {name}, vocabulary {vocabulary:,}: peak over the bare loop's",
                found=f"{our_peak / their_peak:.2f} ({our_peak / 1e9:.1f} GB over {their_peak / 1e9:.1f} GB)",
                bar="at most 1",
                held=our_peak <= their_peak,
            )
        )
    return found


def check_sharing(setting: Setting) -> list[Finding]:
    """A default sharing step in bfloat16, its choice of candidates included, beside a bare loop and
    TRL on the sequences that it trained on, in pairs.
    """
    models = [small_model(setting)] + ([] if setting.short else [random_model(setting, "0.5B")])
    pairs = 2 if setting.short else 6
    found = []
    for name, folder in models:
        for answer in (12,) if setting.short else (300, 1000):
            config = step_positions.config_for(
                folder,
                setting.folder,
                replace(step_positions.SHARING, trainer={"token_budget": 16_384}),
                answer,
                device=setting.device,
                dtype="bfloat16",
            )
            for loop, ours, theirs in step_positions.speeds(config, setting.folder, _PROMPT, answer, pairs):
                ratios = quotients(ours, theirs)
                found.append(
                    Finding(
                        part="sharing",
                        measured=f"{name}, bfloat16, answers of {answer}: trained tokens/s of a default sharing step over {loop}'s",
                        found=f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, n={len(ratios)}; "
                        f"{statistics.median(ours):,.0f} over {statistics.median(theirs):,.0f})",
                    )
                )
    return found


def _steps(learner: Learner, made: list[Batch]) -> None:
    for batch in made:
        learner.step(batch)


def _timed(setting: Setting, work: Any, tokens: int, turns: int) -> tuple[list[float], int]:
    """Tokens per second of each turn after a warm-up turn, and the peak of the GPU's memory in
    bytes (0 on a CPU).
    """
    on_gpu = setting.device.startswith("cuda")
    work()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    rates = []
    for _ in range(turns):
        started = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        rates.append(tokens / (time.perf_counter() - started))
    return rates, torch.cuda.max_memory_allocated() if on_gpu else 0


def check_resume(setting: Setting) -> list[Finding]:
    """Compare four steps in one go with two and two with a checkpoint on disk in between."""
    name, folder = small_model(setting)
    found = []
    for dtype in ("float32", "bfloat16"):
        config = config_for(setting, folder, dtype=dtype)
        whole = Learner(config)
        made = batches(whole, 4, groups=4)
        for batch in made:
            whole.step(batch)
        expected = {name: tensor.cpu() for name, tensor in whole.policy().items()}
        del whole
        resumed = _resumed(setting, config, made)
        largest = max(float((expected[name].float() - resumed[name].float()).abs().max()) for name in expected)
        same = all(torch.equal(expected[name], resumed[name]) for name in expected)
        found.append(
            Finding(
                part="resume",
                measured=f"weights after a resume, {name}, {dtype}: largest distance from those without one",
                found="the same bits" if same else f"{largest:.2g}",
                bar="the same bits",
                held=same,
            )
        )
    return found


def _resumed(setting: Setting, config: NodeConfig, made: list[Batch]) -> dict[str, torch.Tensor]:
    first = Learner(config)
    for batch in made[:2]:
        first.step(batch)
    store = CheckpointStore(setting.folder / f"checkpoints-{config.model.dtype}", keep=1, keep_best=False)
    store.save(first.state(), PolicyVersion(batch_number=2), _trained_model(config))
    del first
    second = Learner(config)
    checkpoint, _ = store.newest()
    assert checkpoint is not None
    second.restore(checkpoint.state)
    for batch in made[2:]:
        second.step(batch)
    return {name: tensor.cpu() for name, tensor in second.policy().items()}


def _trained_model(config: NodeConfig) -> TrainedModel:
    lora = config.trainer.lora
    return TrainedModel(
        model_path=config.model.path,
        dtype=config.model.dtype,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_target_modules=lora.target_modules,
    )


def check_sharded(setting: Setting) -> list[Finding]:
    """Compare two steps of a torchrun process, with FSDP2 over one device (so nothing is split),
    with two steps of a single trainer.
    """
    name, folder = small_model(setting)
    config = config_for(setting, folder)
    alone = Learner(config)
    base = {name: tensor.cpu().clone() for name, tensor in alone.policy().items()}
    made = batches(alone, 2, groups=4)
    for batch in made:
        alone.step(batch)
    expected = {name: tensor.cpu() for name, tensor in alone.policy().items()}
    del alone
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    place = Place.of(os.environ)
    sharded_config = config_for(setting, folder, device="cpu" if setting.device == "cpu" else "auto")
    together = Learner(sharded_config, Sharded(place, join(place, sharded_config)))
    for batch in made:
        together.step(batch)
    found = {name: tensor.cpu() for name, tensor in together.policy().items()}
    largest = max(float((expected[name] - found[name]).abs().max()) for name in expected)
    moved = max(float((expected[name] - base[name]).abs().max()) for name in expected)
    torch.distributed.destroy_process_group()
    return [
        Finding(
            part="sharded",
            measured=f"weights after two steps, {name}, FSDP2 in a group of one process ("
            f"{'gloo' if setting.device == 'cpu' else 'NCCL'}): largest distance from a trainer alone",
            found=f"{largest:.2g} (largest movement {moved:.2g})",
            bar="1e-5",
            held=largest <= 1e-5,
        )
    ]


def check_deltas(setting: Setting) -> list[Finding]:
    """Size of a step's delta, published as bfloat16: the mean of three steps after ten."""
    name, folder = small_model(setting)
    found = []
    for rate, bar in _DELTA_BARS.items():
        trainer = {"learning_rate": rate, "publish_dtype": "bfloat16"}
        learner = Learner(config_for(setting, folder, dtype="bfloat16", trainer=trainer))
        made = batches(learner, 4 if setting.short else 13, groups=4)
        for batch in made[:-3]:
            learner.step(batch)
        base, target, delta = (setting.folder / f"delta-{part}" for part in ("base", "target", "file"))
        write_tensors(learner.policy(), base)
        sizes = []
        for batch in made[-3:]:
            learner.step(batch)
            write_tensors(learner.policy(), target)
            write_delta(base, hashlib.sha256(base.read_bytes()).hexdigest(), target, delta)
            sizes.append(delta.stat().st_size)
            target.replace(base)
        part = base.stat().st_size / statistics.mean(sizes)
        found.append(
            Finding(
                part="deltas",
                measured=f"a policy of {base.stat().st_size / 1e6:,.0f} MB, {name}, one step at learning rate {rate:g} on random "
                "answers: its delta",
                found=f"{statistics.mean(sizes) / 1e6:,.2f} MB, 1/{part:.0f}",
                bar=f"1/{bar}",
                held=None if setting.short else part >= bar,
            )
        )
    return found


@torch.no_grad()
def _disturb(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter += 1e-3 * (torch.rand_like(parameter) < 0.01)


async def check_publish(setting: Setting) -> list[Finding]:
    """Seconds from `Publisher.publish`, as deltas by nats://, after two warm-up policies."""
    name, folder = small_model(setting)
    async with running_server(setting.folder) as server:
        config = node_config(
            setting.folder,
            server.url,
            model={"path": str(folder), "device": setting.device, "dtype": "bfloat16"},
            policy_store={"uri": "nats://"},
        )
        async with node_plane(config, "trainer") as trainer_side, node_plane(config, "generator") as generator_side:
            way = TrainerToGenerator(config, trainer_side, generator_side, dtype=torch.bfloat16, train=_disturb)
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

"""Measures the time from the trainer's call to publish until the first token of the new policy,
compared with a plain file of the same bytes.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Result, in_turns, quotients
from benchmarks.workload import SMOLLM2_135M, model_folder, node_config, node_plane, random_llama, running_server, service_context
from services.generator.engines import create_engine
from services.generator.engines.base import SamplingParams
from services.generator.figures import Figures
from services.generator.policy_follower import PolicyFollower
from services.trainer.checkpoint import PolicyVersion
from services.trainer.step_publisher import Publisher
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.hub_models import hub_arguments
from shared.model.loading import resolve_device
from shared.model.weights import policy_tensors, serialize, write_tensors
from shared.policy_store import open_policy_store

TIMEOUT_S = 60.0


def _move_the_first_parameter(model: Any) -> None:
    next(model.parameters()).add_(1e-4)


class TrainerToGenerator:
    """The services' trainer and generator parts, in one process, on two connections to a real
    server.
    """

    def __init__(
        self,
        config: NodeConfig,
        trainer_side: Any,
        generator_side: Any,
        *,
        dtype: torch.dtype = torch.float32,
        train: Callable[[Any], None] = _move_the_first_parameter,
        anchor_every: int = 0,
    ) -> None:
        """`train` changes the model before a turn's clock starts, so that every version has
        different bytes. `anchor_every`: as in `StorePlace`.
        """
        from transformers import AutoModelForCausalLM

        self._dtype, self._train = dtype, train
        device = config.model.device
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=dtype, **hub_arguments(config.model.path, config.model.revision)
        ).to(resolve_device(device))
        store = open_policy_store(
            config.policy_store_uri,
            trainer_side,
            config.node.id,
            scratch=config.node.run_dir / "published",
            anchor_every=anchor_every,
        )
        staging = config.node.run_dir / "publishing"
        self._publisher = Publisher(store, trainer_side, node=config.node.id, staging=staging, keep=config.policy_store.keep)
        self.engine = create_engine("transformers", config.model.path, revision=config.model.revision, device=device, threads=1)
        self._context = service_context(config, "generator", generator_side)
        self._follower = PolicyFollower(
            self._context, config, self.engine, Figures(self._context.registry, self._context.status, ())
        )
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the base policy and follow the pointer."""
        await self.engine.start()
        self._following = asyncio.create_task(self._follower.follow())
        await asyncio.sleep(0.5)

    async def turn(self, version: int) -> float:
        """Seconds."""
        with torch.no_grad():
            self._train(self._model)
        started = time.perf_counter()
        await self._publisher.publish(self._write, PolicyVersion(batch_number=version, stream_seq=version, consumed_local=version))
        deadline = time.monotonic() + TIMEOUT_S
        while self.engine.policy_version != version:
            if time.monotonic() > deadline:
                raise RuntimeError(f"policy {version} was not loaded within {TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.0005)
        ((sample,),) = await self.engine.generate([[5, 6, 7, 8]], 1, SamplingParams(max_new_tokens=1), seed=0)
        seconds = time.perf_counter() - started
        assert sample.policy_version == version
        await self._publisher.prune()
        return seconds

    async def close(self) -> None:
        """Stop following."""
        await cancel_and_wait(self._following)
        await self.engine.close()

    async def _write(self, file: Path) -> None:
        # The same as the trainer's service writes.
        await asyncio.to_thread(lambda: write_tensors(policy_tensors(self._model, self._dtype), file))

    def policy_bytes(self) -> bytes:
        """The published bytes, for the plain file."""
        return serialize(policy_tensors(self._model, self._dtype))


def plain_file(folder: Path, contents: Callable[[], bytes]) -> Callable[[int], Awaitable[float]]:
    """Returns a turn that writes the bytes to a new file, fsyncs it, opens it again and reads it
    completely, and gives the seconds.
    """

    def once(turn: int) -> float:
        payload = contents()
        target = folder / f"plain-{turn}"
        started = time.perf_counter()
        with target.open("wb", buffering=0) as stream:
            stream.write(payload)
            os.fsync(stream.fileno())
        read = target.read_bytes()
        seconds = time.perf_counter() - started
        assert len(read) == len(payload)
        target.unlink()
        return seconds

    async def turn(number: int) -> float:
        return await asyncio.to_thread(once, number)

    return turn


async def _measure(row: str, pairs: int, model_of: Callable[[Path], Path]) -> Result:
    """Both sides move the same number of bytes on the same file system in turns, so that a busy
    disk slows both. `model_of` creates the model's folder below the folder passed to it.
    """
    with tempfile.TemporaryDirectory(dir=disk_folder()) as name:
        folder = Path(name)
        async with running_server(folder) as server:
            config = node_config(folder, server.url, model={"path": str(model_of(folder))})
            async with node_plane(config, "trainer") as trainer_side, node_plane(config, "generator") as generator_side:
                torch.set_num_threads(1)
                way = TrainerToGenerator(config, trainer_side, generator_side)
                await way.start()
                size_mb = len(way.policy_bytes()) / 1e6
                plain = plain_file(folder, way.policy_bytes)

                async def product(turn: int) -> float:
                    return await way.turn(turn + 1)

                try:
                    ours, theirs = await in_turns(product, plain, pairs=pairs, warm_up=2)
                finally:
                    await way.close()
    return Result(
        row=row,
        measured="seconds from `Publisher.publish` to the first token of the new policy (transformers engine, file:// store)",
        against="writing the same bytes to a file, fsync, opening and reading it back whole",
        workload=f"a policy of {size_mb:.1f} MB (float32 safetensors), different bytes every turn; {pairs} pairs; store and "
        "plain file on the same file system",
        unit="s",
        ratios=quotients(ours, theirs),
        bar=3.0,
        direction="at most",
        product=statistics.median(ours),
        plain=statistics.median(theirs),
        remarks=[
            "the product's way: tensors to a safetensors file, hashed copy into the store with fsync, rename, pointer "
            "to the key-value bucket, watch, hash check, checks of names and shapes, load, copy into the model, one forward pass",
            "the plain side has its bytes ready before the clock starts, and reads from the page cache",
        ],
    )


async def measure_policy_small() -> Result:
    """With the toy policy."""
    return await _measure("policy-small", 15, model_folder)


async def measure_policy_60mb() -> Result:
    """With a policy of about 60 MB."""
    return await _measure("policy-60mb", 9, lambda folder: random_llama(folder, _60_MB, length=512))


_60_MB = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
"""Large enough that moving bytes and not messages takes the time, small enough for many turns."""


def disk_folder() -> Path:
    """A folder for files that must be on a disk."""
    # The temporary folder may be in memory, where fsync costs nothing. Runs are written below var/.
    folder = Path("var/bench")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.absolute()


_CHANGED = 0.01


async def measure_policy_delta() -> Result:
    """With a policy of SmolLM2-135M's size in bfloat16."""
    pairs = 7
    with tempfile.TemporaryDirectory(dir=disk_folder()) as name:
        folder = Path(name)
        model = random_llama(folder, SMOLLM2_135M, dtype="bfloat16")
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(running_server(folder))
            ways = []
            for node, anchor_every in (("deltas", 100), ("full", 1)):
                config = node_config(
                    folder,
                    server.url,
                    node={"id": node, "run": node, "var_dir": str(folder)},
                    model={"path": str(model)},
                    policy_store={"uri": "nats://"},
                )
                trainer_side = await stack.enter_async_context(node_plane(config, "trainer"))
                generator_side = await stack.enter_async_context(node_plane(config, "generator"))
                torch.set_num_threads(1)
                way = TrainerToGenerator(
                    config, trainer_side, generator_side, dtype=torch.bfloat16, train=_train, anchor_every=anchor_every
                )
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
        product=statistics.median(ours),
        plain=statistics.median(theirs),
        remarks=["both sides write, hash and load 270 MB; the delta leaves out sending them and adds comparing and copying them"],
    )


@torch.no_grad()
def _train(model: Any) -> None:
    for parameter in model.parameters():
        bits = parameter.view(torch.int16)
        bits ^= (torch.rand(bits.shape) < _CHANGED).to(torch.int16)

"""Compares the whole generator service with its engine's underlying library, called directly on the
same prompts.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import Result, in_turns, quotients
from benchmarks.workload import node_config, node_plane, running_server, service_context, spec_json
from services.generator.engines.base import SamplingParams
from services.generator.groups import call_seed
from services.generator.service import GeneratorService
from shared.config import NodeConfig
from shared.contracts.codec import decode, encode
from shared.contracts.control import SamplerPosition, TaskLedger
from shared.contracts.messages import RolloutGroup
from shared.contracts.subjects import LEDGER_KEY, SAMPLER_KEY, node_bucket, node_rollouts_stream
from shared.hub_models import hub_arguments
from shared.tasks.derive import derive_item
from shared.transport.base import Transport

SETTLE_S = 2.6
"""A starting service looks for a published policy for two seconds before it draws."""
TURN_TIMEOUT_S = 90.0
FREE_DRAWS = 8


class ServiceSide:
    """The service in this event loop on a real server. All turns share one engine; between turns no
    part of the service runs.

    Draws are released the way the sampler does it, by a `SamplerPosition` that makes room for more.
    """

    def __init__(self, config: NodeConfig, transport: Transport) -> None:
        self._config = config
        self._node = config.node.id
        self._transport = transport
        self.service = GeneratorService(config)
        self.engine: Any = self.service._engine
        self._start, self._close = self.engine.start, self.engine.close
        self._released = 0

    async def start(self) -> None:
        """Load the model once; after that the service's start and end leave the engine
        unchanged.
        """
        await self._start()
        # The draws that admission allows before the first batch count as made, so that every turn's
        # draws are released here.
        ledger = TaskLedger(next_draw=FREE_DRAWS)
        await self._transport.kv.put(node_bucket(self._node), LEDGER_KEY, encode(ledger))

        async def leave() -> None: ...

        self.engine.start = self.engine.close = leave

    async def close(self) -> None:
        """End the engine."""
        await self._close()

    async def turn(self, draws: range) -> float:
        """Make `draws`, which are the next ones. Returns completion tokens per second from the
        first claim to the last stored group.
        """
        context = service_context(self._config, "generator", self._transport)
        groups, first = len(draws), await self._next_draw()
        if first != draws.start:
            raise RuntimeError(f"the ledger is at draw {first}, not at {draws.start}")
        bucket, stream = node_bucket(self._node), node_rollouts_stream(self._node)
        running = asyncio.create_task(self.service.run(context))
        try:
            await asyncio.sleep(SETTLE_S)
            before = (await self._transport.stream_state(stream)).last_seq
            self._released += groups
            position = SamplerPosition(batch_number=0, consumed_local=0, dropped_local=self._released)
            await self._transport.kv.put(bucket, SAMPLER_KEY, encode(position))
            while await self._next_draw() == first:  # noqa: ASYNC110 (another service's key)
                await asyncio.sleep(0.001)
            started = time.perf_counter()
            deadline = time.monotonic() + TURN_TIMEOUT_S
            while (await self._transport.stream_state(stream)).last_seq < before + groups:
                if running.done():
                    running.result()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the service did not store {groups} groups within {TURN_TIMEOUT_S} s")
                await asyncio.sleep(0.01)
            seconds = time.perf_counter() - started
        finally:
            context.stopping.set()
            await running
        tokens = await self._tokens(stream, before + 1, groups)
        await self._transport.purge(stream, before + groups + 1)
        return tokens / seconds

    async def _next_draw(self) -> int:
        entry = await self._transport.kv.get(node_bucket(self._node), LEDGER_KEY)
        return 0 if entry is None else decode(entry.value, TaskLedger).next_draw

    async def _tokens(self, stream: str, first_seq: int, count: int) -> int:
        groups: list[RolloutGroup] = []
        while len(groups) < count:
            messages = await self._transport.read(stream, first_seq + len(groups), count - len(groups))
            groups += [decode(await self._transport.payload(message), RolloutGroup) for message in messages]
        return sum(completion.token_count for group in groups for completion in group.completions)


def _config(folder: Path, url: str, engine: str) -> NodeConfig:
    return node_config(folder, url, generator={"engine": engine}, sampler={"external": 0, "local": FREE_DRAWS, "max_staleness": 0})


def _draws(turn: int, groups: int) -> range:
    return range(FREE_DRAWS + turn * groups, FREE_DRAWS + (turn + 1) * groups)


def _prompts(side: ServiceSide, draws: range) -> list[list[int]]:
    prompts = [side.service._prompter.for_draw(draw).prompt_ids for draw in draws]
    # The service's turn must not find its tasks already derived.
    derive_item.cache_clear()
    return prompts


async def measure_generator_vllm() -> Result:
    """The service with vLLM, compared with the same vLLM instance given the same prompts at
    once.
    """
    groups, pairs = 256, 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running_server(folder) as server:
            config = _config(folder, server.url, "vllm")
            async with node_plane(config, "bench") as transport:
                side = ServiceSide(config, transport)
                await side.start()
                direct = _DirectVllm(side, config)

                async def product(turn: int) -> float:
                    # Neither side may find prefixes in the cache that the other computed.
                    await side.engine._process.vllm.reset_prefix_cache()
                    return await side.turn(_draws(turn, groups))

                async def plain(turn: int) -> float:
                    return await direct.turn(_draws(turn, groups))

                try:
                    ours, theirs = await in_turns(product, plain, pairs=pairs, warm_up=1)
                finally:
                    await side.close()
    return Result(
        row="generator-vllm",
        measured="generator, completion tokens/s: vLLM engine, whole service (ledger, engine, publish to real NATS)",
        against="the same vLLM instance called directly on the same prompts, all at once",
        workload=_workload(config, groups, pairs),
        unit="tokens/s",
        ratios=quotients(ours, theirs),
        bar=0.90,
        direction="at least",
        product=statistics.median(ours),
        plain=statistics.median(theirs),
        remarks=[
            "service: deriving and rendering the tasks, claims by compare-and-set, decoding to text, packing, publishing; "
            "clock from the first claim until the last group is stored",
            "direct: prompts ready before the clock starts, same sampling parameters and seeds, logprobs of the sampled tokens",
        ],
    )


async def measure_generator_transformers() -> Result:
    """The service with the transformers engine, compared with plain batched `model.generate`."""
    groups, pairs = 160, 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running_server(folder) as server:
            config = _config(folder, server.url, "transformers")
            async with node_plane(config, "bench") as transport:
                side = ServiceSide(config, transport)
                await side.start()
                direct = _DirectGenerate(side, config)

                async def product(turn: int) -> float:
                    return await side.turn(_draws(turn, groups))

                async def plain(turn: int) -> float:
                    return await direct.turn(_draws(turn, groups))

                ours, theirs = await in_turns(product, plain, pairs=pairs, warm_up=1)
    return Result(
        row="generator-transformers",
        measured="generator, completion tokens/s: transformers engine, whole service (ledger, engine, publish to real NATS)",
        against="plain batched `model.generate` on the same prompts",
        workload=_workload(config, groups, pairs),
        unit="tokens/s",
        ratios=quotients(ours, theirs),
        bar=0.90,
        direction="at least",
        product=statistics.median(ours),
        plain=statistics.median(theirs),
        remarks=[
            f"generate: {config.generator.groups_per_call} prompts a call as in the service, left-padded, num_return_sequences "
            f"{config.generator.completions}, sampling, key-value cache, no logprobs, no decoding to text; padding is not counted",
            "the service does more: behaviour logprobs, text, packing, ledger, publishing",
        ],
    )


class _DirectVllm:
    def __init__(self, side: ServiceSide, config: NodeConfig) -> None:
        self._side, self._config = side, config
        self._numbers = itertools.count()

    async def turn(self, draws: range) -> float:
        engine, generator = self._side.engine, self._config.generator
        params: SamplingParams = self._side.service._params
        prompts = _prompts(self._side, draws)
        from vllm.inputs import tokens_input

        from services.generator.engines.model_folder import derived_seed

        async def one(draw: int, prompt: list[int]) -> int:
            first = draw - draw % generator.groups_per_call
            seed = derived_seed(call_seed(self._config.node.id, self._config.node.seed, first), draw - first)
            asked = engine._vllm_params(params, n=generator.completions, max_tokens=params.max_new_tokens, seed=seed, logprobs=0)
            async for output in engine._vllm.generate(tokens_input(prompt), asked, f"direct-{next(self._numbers)}"):
                final = output
            return sum(len(each.token_ids) for each in final.outputs)

        await engine._process.vllm.reset_prefix_cache()
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(draw, prompt) for draw, prompt in zip(draws, prompts, strict=True)))
        return sum(counts) / (time.perf_counter() - started)


class _DirectGenerate:
    def __init__(self, side: ServiceSide, config: NodeConfig) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._side, self._config = side, config
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, **hub_arguments(config.model.path, config.model.revision)
        ).eval()

    async def turn(self, draws: range) -> float:
        prompts = _prompts(self._side, draws)
        return await asyncio.to_thread(self._generate, prompts)

    def _generate(self, prompts: list[list[int]]) -> float:
        """Tokens/s of the library called as in its documentation, with the product's settings:
        prompts padded on the left, one thread, the same number of prompts per call. Only tokens up
        to an end token count, because the padding after it is not requested work.
        """
        import torch

        generator, folder = self._config.generator, self._side.engine._folder
        torch.set_num_threads(1)
        tokens = 0
        started = time.perf_counter()
        for first in range(0, len(prompts), generator.groups_per_call):
            part = prompts[first : first + generator.groups_per_call]
            longest = max(map(len, part))
            ids = torch.tensor([[folder.pad_token_id] * (longest - len(prompt)) + prompt for prompt in part])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in part])
            with torch.inference_mode():
                out = self._model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=True,
                    temperature=generator.temperature,
                    top_p=1.0,
                    top_k=0,
                    max_new_tokens=generator.max_new_tokens,
                    num_return_sequences=generator.completions,
                    eos_token_id=list(folder.end_token_ids),
                    pad_token_id=folder.pad_token_id,
                )
            tokens += _counted(out[:, longest:], folder.end_token_ids)
        return tokens / (time.perf_counter() - started)


def _counted(answers: Any, end_token_ids: tuple[int, ...]) -> int:
    """Number of tokens up to and including the first end token of each row."""
    import torch

    ends = torch.isin(answers, torch.tensor(end_token_ids))
    before = (ends.cumsum(dim=1) - ends.long()) == 0
    return int(before.sum())


def _workload(config: NodeConfig, groups: int, pairs: int) -> str:
    generator = config.generator
    return (
        f"the demo's tasks ({spec_json(config)}), {groups} groups of {generator.completions} a turn, at most "
        f"{generator.max_new_tokens} new tokens, temperature {generator.temperature:g}, {generator.groups_per_call} groups a call; "
        f"the demo's model (models/base), float32, 1 thread; {pairs} pairs"
    )

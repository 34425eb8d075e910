"""Fixtures that rows share: the model, a node's configuration, rollout groups of a given shape, a
server, a service's context.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from shared.config import NodeConfig, load_config
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.messages import Batch, BatchItem, Completion, RolloutGroup, Sampling, ScoredGroup, Task, TaskRef
from shared.contracts.sampler_state import SamplerState
from shared.contracts.streams import ensure_node_streams
from shared.contracts.wire import ModelIdentity
from shared.runtime import ServiceContext
from shared.runtime.logs import configure_logging
from shared.runtime.status import StatusBoard
from shared.tasks import TaskSource, derive_task
from shared.tasks.prompt import text_task
from shared.transport.base import Transport
from shared.transport.connect import connect
from swarm_cli.installation import DEMO_CONFIG
from tests.nats_server import NatsServer

SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Arguments of `LlamaConfig`, from the `config.json` of HuggingFaceTB/SmolLM2-135M-Instruct."""
MODEL = Path("models/base")
CHEAP_TASKS = [
    {"dataset": "chain_sum", "weight": 1.0, "config": {}},
    {"dataset": "gcd", "weight": 1.0, "config": {}},
]


def model_folder(folder: Path) -> Path:
    """The toy policy if it is built, else a random model of its size."""
    if (MODEL / "model.safetensors").exists():
        return MODEL
    from tests.engines.tiny_models import random_policy, write_model_folder

    return write_model_folder(folder / "model", random_policy(0, tied=False))


def random_llama(
    folder: Path, shape: Mapping[str, Any], *, length: int = 2048, dtype: str = "float32", spread: float = 0.02
) -> Path:
    """A model folder below `folder` with these shapes, a byte tokenizer and random weights, because
    their values do not matter. `length`: its context; `spread`: of the weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.engines.tiny_models import END_TOKEN_ID, PAD_TOKEN_ID, write_model_folder

    torch.manual_seed(0)
    ends = {"eos_token_id": END_TOKEN_ID, "pad_token_id": PAD_TOKEN_ID}
    given = {"tie_word_embeddings": True, **shape}
    config = LlamaConfig(**given, **ends, max_position_embeddings=length, initializer_range=spread, dtype=dtype)
    return write_model_folder(folder / "model", LlamaForCausalLM(config).to(getattr(torch, dtype)).eval())


def node_config(folder: Path, url: str, **sections: Mapping[str, Any]) -> NodeConfig:
    """The demo's configuration with `sections` merged over it, all files under `folder`, one thread
    and no other nodes.
    """
    overrides: dict[str, Any] = {
        "node": {"id": "bench", "run": "bench", "var_dir": str(folder)},
        "nats": {"node_url": url, "swarm_url": None},
        "model": {"path": str(model_folder(folder))},
        "http": {"base_port": 0},
        "eval": {"tasks": 0},
        "sampler": {"external": 0},
        "log": {"level": "error"},
    }
    for name, values in sections.items():
        if isinstance(values, Mapping):
            overrides[name] = {**overrides.get(name, {}), **values}
        else:
            overrides[name] = values
    return load_config(DEMO_CONFIG, overrides)


@asynccontextmanager
async def running_server(folder: Path) -> AsyncIterator[NatsServer]:
    """A real nats-server with its store under `folder`."""
    server = await asyncio.to_thread(NatsServer(folder / "nats").start)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def node_plane(config: NodeConfig, name: str) -> AsyncIterator[Transport]:
    """A connection to the node plane, with its streams created."""
    transport = await connect(config.nats.node_url, name=name)
    try:
        await ensure_node_streams(transport, config.node.id)
        yield transport
    finally:
        await transport.close()


def service_context(config: NodeConfig, role: str, transport: Transport) -> ServiceContext:
    """The context that `shared.runtime` would pass to the service, with separate metrics."""
    configure_logging(level=config.log.level, log_format="json", file=None)
    return ServiceContext(
        config=config,
        role=role,
        replica=config.node.replica,
        node=transport,
        log=structlog.get_logger(role),
        registry=CollectorRegistry(),
        status=StatusBoard(config.node.id, role, config.node.replica),
        stopping=asyncio.Event(),
    )


def random_batch(
    number: int,
    *,
    groups: int,
    completions: int,
    prompt_tokens: int,
    completion_tokens: tuple[int, int],
    vocabulary: int,
    tokenizer_hash: str,
    end_token_id: int,
) -> Batch:
    """A batch of local groups of random tokens. Every group has right and wrong answers, so that
    all are trained on.
    """
    draw = random.Random(f"batch/{number}")
    task = text_task(TaskRef(dataset="chain_sum", seed=0, index=0), "1 + 1 = ?", "2")
    items = []
    for place in range(groups):
        prompt = [draw.randrange(4, vocabulary) for _ in range(prompt_tokens)]
        answers = []
        for _ in range(completions):
            length = draw.randint(*completion_tokens)
            ids = [draw.randrange(4, vocabulary) for _ in range(length - 1)] + [end_token_id]
            logprobs = [-abs(draw.gauss(6.9, 0.3)) for _ in ids]
            answers.append(
                Completion(
                    text="",
                    finish_reason="stop",
                    token_count=length,
                    token_ids=pack_ids(ids),
                    behaviour_logprobs=pack_logprobs(logprobs),
                )
            )
        group = RolloutGroup(
            node="bench",
            created_at=time.time(),
            draw=number * groups + place,
            task=task,
            completions=answers,
            model=ModelIdentity(name="bench", tokenizer_hash=tokenizer_hash),
            policy_version=max(0, number - 1),
            sampling=Sampling(max_new_tokens=completion_tokens[1]),
            prompt_ids=pack_ids(prompt),
        )
        rewards = [float(index % 2 == 0) for index in range(completions)]
        scored = ScoredGroup(
            group_id=content_id(encode(group)),
            origin="local",
            group=group,
            rewards=rewards,
            scored_by="bench",
            score_seconds=0.0,
            scored_at=time.time(),
        )
        items.append(BatchItem(scored=scored, staleness=0, age_s=0.0))
    return Batch(
        number=number,
        created_at=time.time(),
        items=items,
        strategy="uniform",
        seed=0,
        wanted_local=groups,
        wanted_external=0,
        pool_local=groups,
        pool_external=0,
        shortage="none",
        state=SamplerState(),
    )


def answered_tasks(config: NodeConfig, first_draw: int, count: int, completions: int) -> list[tuple[Task, list[str]]]:
    """Tasks of `count` draws with answers like a half-trained policy's: some right, some nearly
    right, some not numbers.
    """
    source = TaskSource(config.tasks, node=config.node.id, seed=config.node.seed)
    drawn = []
    for number in range(first_draw, first_draw + count):
        task = derive_task(source.ref(number))
        choose = random.Random(f"answers/{number}")
        wrong = [str(choose.randrange(-999, 999)) for _ in range(completions - 3)]
        drawn.append((task, [task.answer or "", f"<answer>{task.answer}</answer>", "I do not know", *wrong]))
    return drawn


def answered_group(config: NodeConfig, draw: int, task: Task, texts: list[str]) -> RolloutGroup:
    """A group like the generator's, with 60 prompt tokens and 20 tokens per answer."""
    ids = list(range(4, 24))
    return RolloutGroup(
        node=config.node.id,
        created_at=time.time(),
        draw=draw,
        task=task,
        completions=[
            Completion(
                text=text,
                finish_reason="stop",
                token_count=len(ids),
                token_ids=pack_ids(ids),
                behaviour_logprobs=pack_logprobs([-1.0] * len(ids)),
            )
            for text in texts
        ],
        model=ModelIdentity(name="bench", tokenizer_hash="0" * 64),
        policy_version=0,
        sampling=Sampling(max_new_tokens=24),
        prompt_ids=pack_ids(list(range(4, 64))),
    )


def spec_json(config: NodeConfig) -> str:
    """The task sources on one line, for a workload's description."""
    return "; ".join(f"{spec.dataset} {json.dumps(spec.config)}" for spec in config.tasks)

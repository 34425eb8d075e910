"""What trainer tests need: a tiny policy on disk, batches made by hand, and a trainer service
living in this process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from prometheus_client import CollectorRegistry
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from services.trainer.checkpoint import CheckpointStore, LearnerState, PolicyVersion, TrainedModel
from services.trainer.learner import Learner
from services.trainer.service import TrainerService
from shared.config import NodeConfig
from shared.config.trainer_section import TrainerConstants
from shared.contracts.codec import decode, encode, pack_ids, pack_logprobs
from shared.contracts.control import PolicyPointer, TrainerPosition
from shared.contracts.messages import Batch, BatchItem, Completion, RolloutGroup, Sampling, ScoredGroup, TaskRef
from shared.contracts.sampler_state import SamplerState
from shared.contracts.status_figures import StatusFigure
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import POLICY_KEY, TRAINER_KEY, node_batches, node_batches_stream, node_bucket
from shared.contracts.wire import ModelIdentity
from shared.model.prompts import tokenizer_hash
from shared.run_records import CHECKPOINTS
from shared.runtime import ServiceContext
from shared.runtime.status import StatusBoard
from shared.tasks.evaluation import PASS_REWARD
from shared.tasks.prompt import text_task
from shared.transport.base import Transport
from tests.constants import load_with_constants
from tests.engines.tiny_models import byte_tokenizer
from tests.objectives import with_options

NODE = "alpha"
OTHER_TOKENIZER = "f" * 64
DEADLINE_S = 180.0


def tiny_policy(folder: Path, *, tied: bool = True, attention_bias: bool = True) -> Path:
    """A random Qwen2 of 2 layers of 32 with the byte tokenizer, saved once per folder."""
    if not (folder / "config.json").exists():
        torch.set_num_threads(1)
        torch.manual_seed(11)
        config = Qwen2Config(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            eos_token_id=256,
            pad_token_id=257,
            dtype="float32",
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folder


def node_config(model: Path, var_dir: Path, **overrides: Any) -> NodeConfig:
    """A node alone on one CPU thread; `trainer`, `policy_store`, `model_section` and so on are
    added section by section. Constants of the trainer may be given like settings.
    """
    sections: dict[str, Any] = {
        "node": {"id": NODE, "run": "test", "var_dir": str(var_dir)},
        "nats": {"swarm_url": None},
        "model": {"path": str(model), "device": "cpu", "threads": 1},
        "tasks": [{"dataset": "chain_sum"}],
        "sampler": {"local": 3, "external": 0},
        "trainer": {"learning_rate": 1e-2, "checkpoint_every": 3},
    }
    for section, values in overrides.items():
        name = section.removesuffix("_section")
        sections[name] = {**sections.get(name, {}), **values}
    trainer = sections["trainer"]
    constants = {name: trainer.pop(name) for name in list(trainer) if name in TrainerConstants.model_fields}
    trainer["constants"] = {**trainer.get("constants", {}), **constants}
    return load_with_constants({**sections, "trainer": with_options(trainer)})


def config_for(model: Path, **trainer: Any) -> NodeConfig:
    """Of a node whose Adam does not magnify the rounding of small gradients."""
    return node_config(model, model.parent, trainer={**trainer, "constants": {"adam_eps": 1e-3, **trainer.get("constants", {})}})


def scored_group(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    *,
    rewards: Sequence[float] = (1.0, 0.0, 0.0, 1.0),
    origin: str = "local",
    same_tokenizer: bool = True,
    version: int = 0,
    **changes: Any,
) -> ScoredGroup:
    """One group with random answers. `changes` replaces fields of its first completion."""
    question = f"What is {rng.randrange(100)} + {rng.randrange(100)}?"
    completions = []
    for _ in rewards:
        ids = [rng.randrange(32, 94) for _ in range(rng.randrange(1, 7))]
        text = tokenizer.decode(ids)
        ids.append(256)
        logprobs = [-rng.uniform(3.0, 6.0) for _ in ids]
        tokens = {"token_ids": pack_ids(ids), "behaviour_logprobs": pack_logprobs(logprobs)} if same_tokenizer else {}
        completions.append(Completion(text=text, finish_reason="stop", token_count=len(ids), **tokens))
    if changes:
        completions[0] = Completion(**{**{f: getattr(completions[0], f) for f in completions[0].__struct_fields__}, **changes})
    identity = tokenizer_hash(tokenizer) if same_tokenizer else OTHER_TOKENIZER
    group = RolloutGroup(
        node=NODE if origin == "local" else "beta",
        created_at=1.0,
        draw=rng.randrange(2**30),
        task=text_task(TaskRef(dataset="chain_sum", seed=1, index=2), question, "4"),
        completions=completions,
        model=ModelIdentity(name="tiny", tokenizer_hash=identity),
        policy_version=version,
        sampling=Sampling(),
        prompt_ids=pack_ids(list(question.encode())) if same_tokenizer else None,
    )
    return ScoredGroup(
        group_id=hashlib.sha256(encode(group)).hexdigest(),
        origin=origin,  # type: ignore[arg-type]
        group=group,
        rewards=list(rewards),
        passed=[reward >= PASS_REWARD for reward in rewards],
        scored_by="test",
        score_seconds=0.0,
        scored_at=1.0,
    )


def batch_of(number: int, scored: Sequence[ScoredGroup]) -> Batch:
    """A batch of these groups."""
    local = sum(group.origin == "local" for group in scored)
    return Batch(
        number=number,
        created_at=1.0,
        items=[BatchItem(scored=group, staleness=1 if group.origin == "local" else None, age_s=0.5) for group in scored],
        strategy="uniform",
        seed=number,
        wanted_local=local,
        wanted_external=len(scored) - local,
        pool_local=local,
        pool_external=len(scored) - local,
        shortage="none",
        state=SamplerState(consumed_local=local * number),
    )


def mixed_batch(tokenizer: PreTrainedTokenizerFast, number: int) -> Batch:
    """Two local groups, one external of the same and one of another tokenizer, one group without
    spread.
    """
    rng = random.Random(number)
    return batch_of(
        number,
        [
            scored_group(tokenizer, rng, version=number - 1),
            scored_group(tokenizer, rng, rewards=(0.0, 0.0, 0.0), version=number - 1),
            scored_group(tokenizer, rng, origin="external", rewards=(0.5, 1.0)),
            scored_group(tokenizer, rng, origin="external", same_tokenizer=False, rewards=(0.0, 1.0, 0.25)),
        ],
    )


async def put_batches(transport: Transport, batches: Sequence[Batch], node: str = NODE) -> None:
    """Play the sampler: append batches to the log."""
    for batch in batches:
        await transport.publish(
            node_batches(node), encode(batch), stream=node_batches_stream(node), message_id=f"batch-{batch.number}"
        )


async def set_up(transport: Transport, batches: Sequence[Batch] = (), node: str = NODE) -> None:
    """Make the node's streams and put batches into the log."""
    await ensure_node_streams(transport, node)
    await put_batches(transport, batches, node)


class Life:
    """A trainer service from start to stop, inside this process."""

    def __init__(self, config: NodeConfig, transport: Transport, learn: Callable[[NodeConfig], Learner] = Learner) -> None:
        self.transport = transport
        self.lines: list[dict[str, Any]] = []
        log = structlog.wrap_logger(None, processors=[self._keep], wrapper_class=structlog.BoundLogger)
        board, stopping = StatusBoard(NODE, "trainer", "test-1"), asyncio.Event()
        self.context = ServiceContext(config, "trainer", "test-1", transport, log, CollectorRegistry(), board, stopping)
        self._running = asyncio.create_task(TrainerService(config, learn).run(self.context))

    def _keep(self, _logger: object, method: str, event: dict[str, Any]) -> dict[str, Any]:
        self.lines.append({**event, "level": method})
        raise structlog.DropEvent

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    def value(self, name: str, **labels: str) -> float:
        return self.context.registry.get_sample_value(name, labels) or 0.0

    async def until(self, condition: Callable[[], bool | Awaitable[bool]]) -> None:
        """Wait for something; what the service dies of is raised here."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            if self._running.done():
                self._running.result()
                raise AssertionError("the trainer ended early")
            await asyncio.sleep(0.005)
        raise AssertionError(f"not so within {DEADLINE_S} s; log: {self.lines}")

    async def until_step(self, step: int) -> None:
        async def there() -> bool:
            found = await trainer_position(self.transport)
            return found is not None and found.policy_version >= step

        await self.until(there)

    async def until_trained(self, step: int) -> None:
        """Wait until a step was taken, whether or not anything of it could be written."""
        await self.until(lambda: self.context.status.get(StatusFigure.STEP) >= step)

    async def until_finished(self) -> None:
        async def there() -> bool:
            found = await trainer_position(self.transport)
            return found is not None and found.finished

        await self.until(there)

    async def stop(self) -> float:
        """Do what SIGTERM does, and return the seconds it took."""
        started = time.monotonic()
        self.context.stopping.set()
        await asyncio.wait_for(self._running, DEADLINE_S)
        return time.monotonic() - started

    def kill(self) -> None:
        """End it in the middle of what it does, without a last checkpoint."""
        self._running.cancel()

    async def end(self) -> None:
        """Wait until the service ends by itself; raises what it dies of."""
        await asyncio.wait_for(self._running, DEADLINE_S)


async def trainer_position(transport: Transport, node: str = NODE) -> TrainerPosition | None:
    entry = await transport.kv.get(node_bucket(node), TRAINER_KEY)
    return decode(entry.value, TrainerPosition) if entry else None


async def policy_pointer(transport: Transport, node: str = NODE) -> PolicyPointer | None:
    entry = await transport.kv.get(node_bucket(node), POLICY_KEY)
    return decode(entry.value, PolicyPointer) if entry else None


def checkpoints(config: NodeConfig) -> CheckpointStore:
    trainer = config.trainer
    return CheckpointStore(config.node.run_dir / CHECKPOINTS, keep=trainer.keep_checkpoints, keep_best=trainer.keep_best)


def same_policy(one: Learner, other: Learner) -> bool:
    """Bit for bit."""
    left, right = one.policy(), other.policy()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def through_a_file(state: LearnerState, folder: Path) -> LearnerState:
    """Saved as a checkpoint and read again."""
    store = CheckpointStore(folder, keep=1, keep_best=False)
    described = TrainedModel(model_path="x", dtype="float32", lora_rank=0, lora_alpha=1.0, lora_target_modules="all-linear")
    store.save(state, PolicyVersion(batch_number=2, stream_seq=2), described)
    checkpoint, _ = store.newest()
    assert checkpoint is not None
    return checkpoint.state


def final_state(config: NodeConfig) -> dict[str, str]:
    """Digest of every tensor of the newest checkpoint, optimizer and random state included, and how
    far it is.
    """
    checkpoint, broken = checkpoints(config).newest()
    assert checkpoint is not None and not broken
    digests: dict[str, str] = {"position": json.dumps(dataclasses.asdict(checkpoint.position))}

    def add(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            digests[name] = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        elif isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
        else:
            digests[name] = repr(value)

    state = checkpoint.state
    add("weights", state.weights)
    add("optimizer", state.optimizer)
    add("random", state.random)
    return digests


def metric_lines(config: NodeConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.node.run_dir / "metrics.jsonl").read_text().splitlines()]

"""A policy that generators cannot fetch is published again as a full copy, so that a node never
waits for ever.

A real trainer and a real engine, loaded one after the other in one process; the server is the one
in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from msgspec import structs
from prometheus_client import CollectorRegistry
from transformers import PreTrainedTokenizerFast

from services.generator.engines import Engine, TurnTakingEngine, create_engine
from services.generator.engines.transformers_engine import TransformersEngine
from services.generator.figures import Figures
from services.generator.policy_follower import PolicyFollower
from services.trainer.step_publisher import ANSWERS
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.contracts.codec import encode
from shared.contracts.control import PolicyPointer
from shared.contracts.subjects import POLICY_KEY, node_bucket, node_policies_stream
from shared.device_turns import DeviceTurns
from shared.policy_store import open_policy_store
from shared.policy_store.files import sha256_of
from shared.runtime import ServiceContext
from shared.runtime.status import StatusBoard
from shared.transport.base import Transport
from tests.constants import with_constants
from tests.integration.trainer_fixtures import model, tokenizer, transport
from tests.integration.trainer_life import NODE, Life, mixed_batch, node_config, policy_pointer, put_batches, set_up
from tests.nats_server import delete_message

__all__ = ["model", "tokenizer", "transport"]


def configured(model: Path, folder: Path) -> NodeConfig:
    """Small steps, published as bfloat16: deltas that are worth it."""
    trainer = {"learning_rate": 1e-5, "publish_dtype": "bfloat16", "checkpoint_every": 100}
    return node_config(model, folder, trainer=trainer, policy_store={"uri": "nats://"})


class Generator:
    """An engine that follows the node's policies."""

    def __init__(self, config: NodeConfig, transport: Transport, engine: Engine) -> None:
        board, stopping = StatusBoard(NODE, "generator", "0"), asyncio.Event()
        log = structlog.wrap_logger(None, processors=[self._keep], wrapper_class=structlog.BoundLogger)
        self.events: list[str] = []
        context = ServiceContext(config, "generator", "0", transport, log, CollectorRegistry(), board, stopping)
        self.engine, self.board = engine, board
        self.follower = PolicyFollower(context, config, engine, Figures(context.registry, context.status, ()))

    def _keep(self, _logger: object, _method: str, event: dict[str, str]) -> dict[str, str]:
        self.events.append(event["event"])
        raise structlog.DropEvent

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.follower.follow())
        try:
            yield
        finally:
            await cancel_and_wait(task)
            assert task.cancelled()

    def has(self, version: int) -> bool:
        return self.engine.policy_version == version


@asynccontextmanager
async def generating(config: NodeConfig, transport: Transport) -> AsyncIterator[Generator]:
    engine = create_engine("transformers", config.model.path, device="cpu", threads=1)
    await engine.start()
    try:
        yield Generator(config, transport, engine)
    finally:
        await engine.close()


async def published(transport: Transport, life: Life, version: int) -> PolicyPointer:
    found: list[PolicyPointer] = []

    async def there() -> bool:
        pointer = await policy_pointer(transport)
        if pointer is not None and pointer.version == version:
            found.append(pointer)
        return bool(found)

    await life.until(there)
    return found[-1]


def was_published_whole(life: Life) -> None:
    """A slow generator asks again before it sees the answer, which is then given again."""
    assert 1 <= len(life.logged("policy_published_whole")) <= ANSWERS


async def test_a_lost_delta_is_answered_with_a_full_copy(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = configured(model, tmp_path)
    await set_up(transport, [mixed_batch(tokenizer, number) for number in (1, 2)])
    life = Life(config, transport)
    await life.until_step(2)
    async with generating(config, transport) as generator:
        async with generator.following():
            await life.until(lambda: generator.has(2))
        await put_batches(transport, [mixed_batch(tokenizer, 3)])
        pointer = await published(transport, life, 3)
        assert pointer.deltas, "or nothing can be lost of it"
        lost = int(pointer.deltas[-1].file.uri.rpartition("=")[2])
        await delete_message(transport, node_policies_stream(NODE), lost)
        async with generator.following():
            await life.until(lambda: generator.has(3))
        assert "policy_swap_failed" in generator.events
        was_published_whole(life)
        whole = await policy_pointer(transport)
        assert whole is not None and (whole.version, whole.sha256, whole.deltas) == (3, pointer.sha256, [])
        await put_batches(transport, [mixed_batch(tokenizer, 4)])
        assert (await published(transport, life, 4)).deltas, "and deltas go on from it"
    await life.stop()


async def test_a_trainer_s_damaged_copy_is_found_by_its_readers_and_left_behind(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = configured(model, tmp_path)
    await set_up(transport, [mixed_batch(tokenizer, number) for number in (1, 2)])
    life = Life(config, transport)
    await life.until_step(2)
    async with generating(config, transport) as generator, generator.following():
        await life.until(lambda: generator.has(2))
        kept = config.node.run_dir / "published" / "newest.safetensors"
        contents = bytearray(kept.read_bytes())
        contents[-1000] ^= 1
        kept.write_bytes(bytes(contents))
        await put_batches(transport, [mixed_batch(tokenizer, 3)])
        await life.until(lambda: generator.has(3))
        was_published_whole(life)
    await life.stop()


async def test_a_refusal_is_answered_once_and_one_of_an_older_policy_not_at_all(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = configured(model, tmp_path)
    await set_up(transport, [mixed_batch(tokenizer, number) for number in (1, 2)])
    life = Life(config, transport)
    await life.until_step(2)
    async with generating(config, transport) as generator:
        pointer = await published(transport, life, 2)
        for refused in (structs.replace(pointer, version=1, sha256="0" * 64), structs.replace(pointer, sha256="1" * 64)):
            await generator.follower._tell(refused, "it is not there")
            await asyncio.sleep(2.5)
            assert not life.logged("policy_published_whole")
        await generator.follower._tell(pointer, "it is not there")
        await life.until(lambda: bool(life.logged("policy_published_whole")))
        await asyncio.sleep(2.5)
        assert len(life.logged("policy_published_whole")) == 1
    await life.stop()


async def test_a_generator_that_sees_no_policy_at_all_does_not_have_it_sent_for_ever(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = configured(model, tmp_path)
    await set_up(transport, [mixed_batch(tokenizer, 1)])
    life = Life(config, transport)
    await life.until_step(1)
    async with generating(config, transport) as generator:
        pointer = await published(transport, life, 1)
        for times in (1, 2, 3):
            await generator.follower._tell(pointer, "it is not there")
            await life.until(lambda times=times: len(life.logged("policy_published_whole")) == times)
        for _ in range(2):
            await generator.follower._tell(pointer, "it is not there")
            await asyncio.sleep(1.3)
        assert len(life.logged("policy_published_whole")) == 3
    await life.stop()


async def test_other_weights_under_the_same_version_are_loaded(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    """A trainer that lost some steps makes a version again, and not the same."""
    config = configured(model, tmp_path)
    await set_up(transport, [mixed_batch(tokenizer, number) for number in (1, 2, 3)])
    life = Life(config, transport)
    first = await published(transport, life, 3)
    async with generating(config, transport) as generator, generator.following():
        await life.until(lambda: generator.has(3))
        other = await open_policy_store("nats://", transport, NODE).fetch(first, tmp_path / "cache")
        changed = tmp_path / "changed.safetensors"
        contents = bytearray(other.read_bytes())
        contents[-1] ^= 1
        changed.write_bytes(bytes(contents))
        stored = await open_policy_store("nats://", transport, NODE).publish(changed, 3)
        again = structs.replace(first, sha256=stored.sha256, uri=stored.uri, anchor=None, deltas=[])
        await transport.kv.put(node_bucket(NODE), POLICY_KEY, encode(again))
        loaded = generator.follower
        await life.until(lambda: loaded.loaded is not None and loaded.loaded.sha256 == again.sha256)
        assert sha256_of(other) == first.sha256 != again.sha256
    await life.stop()


class SlowLoad(TransformersEngine):
    """The real engine, whose loads go through and then keep their caller waiting: a deadline
    strikes when all is done.
    """

    waits_s = 0.0

    async def load_policy(self, weights_file: Path, version: int) -> None:
        await super().load_policy(weights_file, version)
        await asyncio.sleep(self.waits_s)


class LateLoad(SlowLoad):
    """Its first load of a policy begins late, as on a busy machine."""

    async def load_policy(self, weights_file: Path, version: int) -> None:
        await asyncio.sleep(self.waits_s)
        await super(SlowLoad, self).load_policy(weights_file, version)


async def test_a_load_that_takes_longer_than_its_deadline_gets_twice_as_long_and_the_state_says_so(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    """Or a generator on a busy machine would begin anew for ever, and be said to be generating."""
    config = with_constants(configured(model, tmp_path), generator={"policy_load_timeout_s": 1.0})
    await set_up(transport, [mixed_batch(tokenizer, 1)])
    life = Life(config, transport)
    await published(transport, life, 1)
    engine = LateLoad(config.model.path, device="cpu", threads=1)
    engine.waits_s = 2.5
    await engine.start()
    generator = Generator(config, transport, engine)
    states: list[str] = []

    def done() -> bool:
        states.append(generator.board.snapshot().state)
        return generator.has(1) and "policy_loaded" in generator.events

    async with generator.following():
        await life.until(done)
    assert generator.events == ["policy_swap_failed", "policy_swap_failed", "policy_loaded"], "1 s, 2 s and 4 s"
    seen = list(dict.fromkeys(states))
    loading = "loading policy version 1"
    assert {loading, f"{loading}, tried 1 time", f"{loading}, tried 2 times", "generating"} <= set(seen), seen
    await engine.close()
    await life.stop()


@pytest.mark.parametrize("in_turns", [False, True])
async def test_a_load_whose_deadline_strikes_when_it_is_done_counts_as_loaded(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path, in_turns: bool
) -> None:
    """Or the generator would count its groups from the old policy, and in the end make none."""
    config = configured(model, tmp_path)
    config = with_constants(config, generator={"policy_load_timeout_s": 1.0})
    await set_up(transport, [mixed_batch(tokenizer, 1)])
    life = Life(config, transport)
    await published(transport, life, 1)
    slow = SlowLoad(config.model.path, device="cpu", threads=1)
    slow.waits_s = 60.0
    engine: Engine = TurnTakingEngine(slow, DeviceTurns(tmp_path / "device.turns", "generator")) if in_turns else slow
    async with engine.turn():
        await engine.start()
    generator = Generator(config, transport, engine)
    async with generator.following():
        loaded = generator.follower
        await life.until(lambda: loaded.loaded is not None and loaded.loaded.version == 1)
    assert generator.events == ["policy_loaded"]
    await engine.close()
    await life.stop()


async def test_the_wait_for_a_turn_is_not_the_load_s(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = configured(model, tmp_path)
    config = with_constants(config, generator={"policy_load_timeout_s": 2.0})
    await set_up(transport, [mixed_batch(tokenizer, 1)])
    life = Life(config, transport)
    await published(transport, life, 1)
    file = tmp_path / "device.turns"
    engine = create_engine("transformers", config.model.path, device="cpu", threads=1, turns=DeviceTurns(file, "generator"))
    async with engine.turn():
        await engine.start()
    generator = Generator(config, transport, engine)
    async with DeviceTurns(file, "trainer").turn():
        following = asyncio.create_task(generator.follower.follow())
        await asyncio.sleep(3.0)
        assert not generator.events and engine.policy_version == 0
    await life.until(lambda: bool(generator.events))
    await cancel_and_wait(following)
    assert following.cancelled()
    assert generator.events == ["policy_loaded"] and generator.has(1)
    await engine.close()
    await life.stop()

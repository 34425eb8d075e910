"""The batch log is a window: a trainer writes its checkpoint before the log forgets a batch that
none holds, and waits where it cannot.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import services.trainer.batch_log as batch_log
from shared.contracts.codec import encode
from shared.contracts.limits import NODE_LIMITS
from shared.contracts.streams import node_streams
from shared.transport.base import Transport
from tests.full_disk import no_file_above
from tests.integration.trainer_fixtures import STREAM, model, some_batches, tokenizer
from tests.integration.trainer_life import NODE, Life, checkpoints, node_config, put_batches, set_up
from tests.nats_server import own_plane

__all__ = ["model", "tokenizer"]

UNSAVED = 2


async def small_log(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, counted: str) -> Transport:
    """A log of twice what may be unsaved, by messages or by bytes."""
    size_bytes = max(len(encode(batch)) for batch in some_batches(tokenizer, 12))
    if counted == "messages":
        limits = replace(NODE_LIMITS, unsaved_max_msgs=UNSAVED, batches_max_msgs=2 * UNSAVED)
    else:
        limits = replace(NODE_LIMITS, unsaved_max_bytes=UNSAVED * size_bytes, batches_max_bytes=2 * UNSAVED * size_bytes)
    monkeypatch.setattr(batch_log, "NODE_LIMITS", limits)
    transport = await own_plane()
    await set_up(transport)
    (spec,) = (each for each in node_streams(NODE) if each.name == STREAM)
    await transport.ensure_stream(replace(spec, max_msgs=limits.batches_max_msgs, max_bytes=limits.batches_max_bytes))
    return transport


@pytest.mark.parametrize("counted", ["messages", "bytes"])
async def test_a_trainer_killed_before_its_first_checkpoint_was_due_finds_what_it_needs_in_a_full_log(
    model: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: str
) -> None:
    transport = await small_log(tokenizer, monkeypatch, counted)
    config = node_config(model, tmp_path, trainer={"checkpoint_every": 100})
    life = Life(config, transport)
    for number in range(1, 8):
        await put_batches(transport, some_batches(tokenizer, 1, first=number))
        await life.until_step(number)
    life.kill()
    assert checkpoints(config).steps(), "none was due, and the log had room for four batches"
    assert (await transport.stream_state(STREAM)).first_seq > 1

    await put_batches(transport, some_batches(tokenizer, 1, first=8))
    again = Life(config, transport)
    await again.until_step(8)
    await again.stop()


async def test_where_no_checkpoint_can_be_written_training_waits_for_the_disk_before_the_log_forgets(
    model: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = await small_log(tokenizer, monkeypatch, "messages")
    config = node_config(model, tmp_path, trainer={"checkpoint_every": 1})
    life = Life(config, transport)
    with no_file_above(20_000):
        await put_batches(transport, some_batches(tokenizer, 4))
        await life.until(lambda: bool(life.logged("training_waits")))
        await asyncio.sleep(0.2)
        assert life.context.status.snapshot().state == "waiting for a checkpoint"
        assert not checkpoints(config).steps()
        assert len(life.logged("step")) <= UNSAVED
    await life.until_step(4)
    await life.until(lambda: checkpoints(config).steps()[-1:] == [4])
    await life.stop()
    assert len(life.logged("training_waits")) == 1 and str(config.node.run_dir) in life.logged("training_waits")[0]["remedy"]


async def test_a_trainer_that_waits_for_the_disk_stops_when_it_is_told_to(
    model: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = await small_log(tokenizer, monkeypatch, "messages")
    life = Life(node_config(model, tmp_path, trainer={"checkpoint_every": 1}), transport)
    with no_file_above(20_000):
        await put_batches(transport, some_batches(tokenizer, 4))
        await life.until(lambda: bool(life.logged("training_waits")))
        assert await life.stop() < 10.0


@pytest.mark.parametrize("prefetch", [1, 2, 5, 64])
def test_what_the_log_must_hold_fits_it_with_a_quarter_to_spare(prefetch: int) -> None:
    """Trained on and unsaved: up to the bound, and the batch by which it is reached. Ahead of the
    trainer: `prefetch`.
    """
    batch_bytes = NODE_LIMITS.batch_bytes(prefetch)
    assert NODE_LIMITS.unsaved_max_bytes + (1 + prefetch) * batch_bytes <= 0.75 * NODE_LIMITS.batches_max_bytes
    assert NODE_LIMITS.unsaved_max_msgs + 1 + prefetch < NODE_LIMITS.batches_max_msgs
    assert NODE_LIMITS.batch_bytes(1) >= 2 * NODE_LIMITS.group_max_bytes

"""A trainer and its device: turns that it shares with others, and a step that does not fit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from services.trainer.learner import Learner
from services.trainer.records import StepRecord
from shared.contracts.messages import Batch
from shared.device_turns import DeviceTurns, turns_file
from shared.runtime import FatalError
from shared.transport.base import Transport
from tests.integration.trainer_fixtures import model, some_batches, tokenizer, transport
from tests.integration.trainer_life import Life, checkpoints, node_config, put_batches, set_up

__all__ = ["model", "tokenizer", "transport"]


async def test_a_trainer_that_waits_for_its_turn_on_the_device_stops_with_a_checkpoint_of_what_it_trained(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, model_section={"device_turns": True})
    others = DeviceTurns(turns_file(tmp_path, "cpu"), "generator of beta")
    await set_up(transport, some_batches(tokenizer, 2))
    life = Life(config, transport)
    await life.until_step(2)
    async with others.turn():
        await put_batches(transport, some_batches(tokenizer, 1, first=3))
        await life.until(others.wanted)
        assert await life.stop() < 10.0
    assert checkpoints(config).steps()[-1] == 2
    life = Life(config, transport)
    await life.until_step(3)
    await life.stop()


async def test_a_turn_that_cannot_be_had_is_a_fatal_error_with_a_remedy(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    turns_file(tmp_path, "cpu").mkdir()
    await set_up(transport, some_batches(tokenizer, 1))
    with pytest.raises(FatalError, match="no turn on the device .* unset model.device_turns"):
        await Life(node_config(model, tmp_path, model_section={"device_turns": True}), transport).end()


class FullDevice(Learner):
    """A learner for whose steps there is no memory. Stands in for a GPU, which tests cannot count
    on.
    """

    def step(self, batch: Batch) -> StepRecord:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("in_turns", [False, True])
async def test_a_step_that_does_not_fit_is_fatal_unless_others_may_have_the_memory_yet(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path, in_turns: bool
) -> None:
    """One that was killed in its turn gives its memory back a moment after its turn: then a
    supervisor starts the trainer again.
    """
    config = node_config(model, tmp_path, model_section={"device_turns": in_turns})
    await set_up(transport, some_batches(tokenizer, 1))
    with pytest.raises((FatalError, RuntimeError), match="step 1 does not fit .*2.00 GiB.*lower trainer.token_budget") as raised:
        await Life(config, transport, learn=FullDevice).end()
    assert isinstance(raised.value, FatalError) != in_turns
    async with asyncio.timeout(120), DeviceTurns(turns_file(tmp_path, "cpu"), "the next").turn():
        pass

"""A trainer whose checkpoints, batches or model are broken or gone goes back to what is whole, or
ends and says what to do.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from shared.contracts.codec import encode
from shared.runtime import FatalError
from shared.transport.base import Transport
from tests.integration.trainer_fixtures import STREAM, model, some_batches, tokenizer, transport
from tests.integration.trainer_life import (
    NODE,
    Life,
    checkpoints,
    final_state,
    metric_lines,
    mixed_batch,
    node_config,
    put_batches,
    set_up,
)
from tests.nats_server import own_plane

__all__ = ["model", "tokenizer", "transport"]


async def test_a_broken_newest_checkpoint_is_put_aside_and_the_one_before_gives_the_same_end(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 8})
    await set_up(transport, some_batches(tokenizer, 8))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    expected = final_state(config)
    newest = checkpoints(config).folder / "step-00000008" / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-5])

    life = Life(config, transport)
    await life.until(lambda: bool(life.logged("finished")))
    await life.stop()
    (warning,) = life.logged("checkpoint_broken")
    assert "torn or altered" in warning["reason"] and life.value("swarm_trainer_corrupt_checkpoints_total") == 1
    assert final_state(config) == expected
    assert [line["step"] for line in metric_lines(config)] == list(range(1, 9))
    assert not life.logged("policy_published_again")


async def test_when_no_checkpoint_is_whole_it_refuses_to_start_and_says_what_to_do(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 4})
    await set_up(transport, some_batches(tokenizer, 4))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    for step in checkpoints(config).steps():
        (checkpoints(config).folder / f"step-{step:08d}" / "manifest.json").write_text("{}")
    with pytest.raises(FatalError, match="no checkpoint in .* can be used .* restore one .* node.run"):
        await Life(config, transport).end()


async def test_batches_that_are_gone_from_the_log_are_a_fatal_error_with_a_remedy(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 9})
    await set_up(transport, some_batches(tokenizer, 5))
    await transport.purge(STREAM, 2)
    with pytest.raises(
        FatalError, match="batch 1 is missing .* the log continues with batch 3, and there is no checkpoint. Restore"
    ):
        await Life(config, transport).end()
    await transport.purge(STREAM, 5)
    with pytest.raises(FatalError, match="nothing is left of it"):
        await Life(config, transport).end()


@pytest.mark.slow
async def test_a_trainer_that_cannot_go_on_leaves_its_record_and_its_broken_checkpoints_as_they_were(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    config = node_config(model, tmp_path, trainer={"max_steps": 4, "checkpoint_every": 2})
    await set_up(transport, some_batches(tokenizer, 4))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    record = metric_lines(config)
    assert [line["step"] for line in record] == [1, 2, 3, 4] and checkpoints(config).steps() == [2, 4]

    broken = checkpoints(config).folder / "step-00000004" / "weights.safetensors"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-5])
    with pytest.raises(FatalError, match="ends at 0"):
        await Life(config, await restored(tokenizer, 0)).end()
    assert metric_lines(config) == record and checkpoints(config).steps() == [2, 4]

    shutil.rmtree(checkpoints(config).folder)
    await transport.purge(STREAM, 2)
    with pytest.raises(FatalError, match="batch 1 is missing .* there is no checkpoint"):
        await Life(config, transport).end()
    assert metric_lines(config) == record


async def restored(tokenizer: PreTrainedTokenizerFast, upto: int, purged: int = 0) -> Transport:
    """A server whose log is as it was when batch `upto` was the newest."""
    server = await own_plane()
    await set_up(server, some_batches(tokenizer, upto))
    if purged:
        await server.purge(STREAM, purged)
    return server


async def test_a_log_restored_from_a_backup_older_than_the_newest_checkpoint_names_the_command_that_goes_on(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    """The last checkpoint is written when the trainer is stopped for the restore, so a backup of a
    running node is always older.
    """
    config = node_config(model, tmp_path / "a folder", trainer={"max_steps": 8})
    await set_up(transport, some_batches(tokenizer, 8))
    life = Life(config, transport)
    await life.until_finished()
    await life.stop()
    expected = final_state(config)
    assert checkpoints(config).steps() == [6, 8]

    for purged in (3, 6):
        with pytest.raises(FatalError, match="ends at 7, .* step 8 contains it up to 8: the stream was restored") as raised:
            await Life(config, await restored(tokenizer, 7, purged)).end()
        told = str(raised.value)
        assert "Training then continues after step 6" in told and "anew" not in told
    with pytest.raises(FatalError, match=r"ends at 2, .* or created anew, .* no checkpoint in .* fits it .* at 0 to 2\). Put back"):
        await Life(config, await restored(tokenizer, 2)).end()
    with pytest.raises(FatalError, match="ends at 0, .* the stream was created anew. Restore"):
        await Life(config, await restored(tokenizer, 0)).end()

    (command,) = re.findall("`(.*)`", told)
    await asyncio.to_thread(subprocess.run, command, shell=True, check=True)
    assert checkpoints(config).steps() == [6]
    server = await restored(tokenizer, 7, 6)
    life = Life(config, server)
    await life.until_step(7)
    await put_batches(server, some_batches(tokenizer, 1, first=8))
    await life.until_finished()
    await life.stop()
    assert final_state(config) == expected, "the same as without a restore"
    assert [line["step"] for line in metric_lines(config)] == list(range(1, 9))


async def test_a_message_that_is_no_batch_is_a_fatal_error(
    model: Path, tokenizer: PreTrainedTokenizerFast, transport: Transport, tmp_path: Path
) -> None:
    await set_up(transport)
    await transport.publish(f"node.{NODE}.batches", encode(mixed_batch(tokenizer, 1))[:-9], stream=STREAM, message_id="x")
    with pytest.raises(FatalError, match="is not a batch that this version can read .*malformed"):
        await Life(node_config(model, tmp_path), transport).end()


async def test_a_missing_model_is_a_fatal_error_with_a_remedy(transport: Transport, tmp_path: Path) -> None:
    await set_up(transport)
    config = node_config(tmp_path / "nowhere", tmp_path)
    with pytest.raises(FatalError, match="is not a folder: check the spelling, import a model with"):
        await Life(config, transport).end()

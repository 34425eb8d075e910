"""Invariant 2 for the trainer: killed at any instant and started again, it ends with the same
weights, bit for bit.

Real processes against a real nats-server: the log, the pointer and the position outlive the
trainer, its memory does not.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from shared.config import NodeConfig, load_config
from shared.config.model_section import ModelSection
from shared.model.reading import load_tokenizer
from shared.run_records import CHECKPOINTS
from shared.runtime import EXIT_CONFIG
from shared.runtime.exits import EXIT_UNSAVED
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.integration.trainer_life import final_state, metric_lines, mixed_batch, policy_pointer, set_up, tiny_policy
from tests.integration.trainer_process import Death, start, write_config
from tests.long_forms import FULL

STEPS = 6
KILLS = 8 if FULL else 4
"""At random instants."""
DEADLINE_S = 180.0


@dataclass
class Node:
    """One node's configuration, log and folder."""

    name: str
    config_file: Path
    config: NodeConfig
    transport: Transport

    async def finished(self, child: ForkServerProcess) -> None:
        """Wait until this trainer has nothing left to train, then stop it as the supervisor
        would.
        """
        deadline = time.monotonic() + DEADLINE_S
        while not await asyncio.to_thread(self._says_finished, child):
            assert child.is_alive(), f"the trainer ended early:\n{self.log()}"
            assert time.monotonic() < deadline, f"not finished within {DEADLINE_S} s:\n{self.log()}"
            await asyncio.sleep(0.01)
        assert await ended(child, terminate=True) == 0

    def _says_finished(self, child: ForkServerProcess) -> bool:
        file = self.config.node.run_dir / "trainer.log"
        _, _, rest = (file.read_text() if file.exists() else "").partition(f'"pid": {child.pid},')
        return '"event": "finished"' in rest

    def log(self) -> str:
        return (self.config.node.run_dir / "trainer.log").read_text()[-3000:]


def wait_for_a_line(file: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (file.exists() and file.stat().st_size):
        assert time.monotonic() < deadline, f"{file} has no line after {DEADLINE_S} s"
        time.sleep(0.005)


def weights_and_optimizer(config: NodeConfig) -> dict[str, str]:
    """All that nodes of different names have in common: each seeds its random numbers with its
    name.
    """
    return {name: digest for name, digest in final_state(config).items() if not name.startswith("random.")}


async def ended(child: ForkServerProcess, *, terminate: bool = False) -> int | None:
    """Wait for the process without blocking the loop; its exit code."""
    if terminate:
        child.terminate()
    await asyncio.to_thread(child.join, DEADLINE_S)
    return child.exitcode


class Nodes:
    """Makes nodes on one server, each with the same batches in its log."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._count = url, folder, 0
        self.model = tiny_policy(folder / "model")
        tokenizer = load_tokenizer(ModelSection(path=str(self.model)))
        self.batches = [mixed_batch(tokenizer, number) for number in range(1, STEPS + 1)]
        self._uninterrupted: dict[str, str] | None = None

    async def node(self, trainer: str = "checkpoint_every = 2", steps: int = STEPS) -> Node:
        self._count += 1
        name = f"killed-{self._count}"
        folder = self._folder / name
        trainer = f"max_steps = {steps}\n{trainer}"
        file = write_config(folder / "node.toml", node=name, url=self._url, model=self.model, var_dir=folder, trainer=trainer)
        transport = await connect(self._url, name=f"test-{name}")
        await set_up(transport, self.batches, name)
        return Node(name, file, load_config(file), transport)

    async def uninterrupted(self) -> dict[str, str]:
        """Return how training ends when nobody kills it."""
        if self._uninterrupted is None:
            node = await self.node()
            await node.finished(start(node.config_file))
            self._uninterrupted = weights_and_optimizer(node.config)
            await node.transport.close()
        return self._uninterrupted


@pytest.fixture(scope="module")
def nodes(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    yield Nodes(nats_url, tmp_path_factory.mktemp("killed"))


LEARN = "services.trainer.learner.Learner.step"
INSTANTS = [
    # Every other step has a checkpoint. In the short form: one without, and the last.
    Death(LEARN, 3, "after"),
    Death(LEARN, STEPS, "after"),
    *(pytest.param(Death(LEARN, step, "after"), marks=pytest.mark.long) for step in (1, 2, 4, 5)),
    Death(LEARN, 1, "before"),
    Death("services.trainer.step_publisher.Publisher.publish", 3, "before"),
    Death("services.trainer.step_publisher.StepPublisher._announce", 4, "before"),
    Death("services.trainer.records.MetricsLog.append", 4, "before"),
    pytest.param(Death("services.trainer.records.MetricsLog.append", 4, "after"), marks=pytest.mark.long),
    Death("services.trainer.checkpoint._write_file", 5, "before"),
    Death("services.trainer.checkpoint._write_file", 6, "after"),
    Death("services.trainer.checkpoint.CheckpointStore.save", 2, "after"),
    Death("services.trainer.checkpoint.CheckpointStore.prune", 3, "after"),
    Death("services.trainer.batch_log.BatchLog.forget", 2, "before"),
]


@pytest.mark.parametrize("death", INSTANTS, ids=lambda death: f"{death.when}-{death.function.rsplit('.', 1)[1]}-{death.call}")
async def test_a_trainer_killed_at_this_instant_ends_with_the_same_weights(nodes: Nodes, death: Death) -> None:
    expected = await nodes.uninterrupted()
    node = await nodes.node()
    assert await ended(start(node.config_file, death)) == -signal.SIGKILL, node.log()
    await node.finished(start(node.config_file))

    assert weights_and_optimizer(node.config) == expected
    assert [line["step"] for line in metric_lines(node.config)] == list(range(1, STEPS + 1))
    pointer = await policy_pointer(node.transport, node.name)
    assert pointer is not None and pointer.version == STEPS
    assert "policy_published_again" not in node.log()
    await node.transport.close()


async def test_a_trainer_killed_again_and_again_at_random_instants_ends_with_the_same_weights(nodes: Nodes) -> None:
    expected = await nodes.uninterrupted()
    node = await nodes.node("checkpoint_every = 1\nkeep_checkpoints = 2")
    rng = random.Random(5)
    deaths = 0
    while deaths < KILLS:
        child = start(node.config_file)
        await asyncio.to_thread(child.join, rng.uniform(0.1, 0.6))
        child.kill()
        assert await ended(child) == -signal.SIGKILL
        deaths += 1
    await node.finished(start(node.config_file))
    assert weights_and_optimizer(node.config) == expected
    assert [line["step"] for line in metric_lines(node.config)] == list(range(1, STEPS + 1))
    await node.transport.close()


async def test_sigterm_ends_with_a_checkpoint_and_exit_0_within_four_seconds(nodes: Nodes) -> None:
    node = await nodes.node("checkpoint_every = 100", steps=1000)
    child = start(node.config_file)
    await asyncio.to_thread(wait_for_a_line, node.config.node.run_dir / "metrics.jsonl")
    started = time.monotonic()
    assert await ended(child, terminate=True) == 0
    assert time.monotonic() - started < 4.0
    trained = len(metric_lines(node.config))
    position = final_state(node.config)["position"]
    assert f'"batch_number": {trained}' in position
    await node.transport.close()


@pytest.mark.parametrize("steps", [1, 1000], ids=["finished", "stopped"])
async def test_a_trainer_that_never_could_save_a_checkpoint_ends_with_an_exit_code_of_its_own(nodes: Nodes, steps: int) -> None:
    node = await nodes.node("checkpoint_every = 1", steps=steps)
    checkpoints = node.config.node.run_dir / CHECKPOINTS
    checkpoints.parent.mkdir(parents=True)
    checkpoints.write_text("a file where a folder belongs")
    child = start(node.config_file)
    await asyncio.to_thread(wait_for_a_line, node.config.node.run_dir / "metrics.jsonl")
    assert await ended(child, terminate=True) == EXIT_UNSAVED
    lines = [json.loads(line) for line in (node.config.node.run_dir / "trainer.log").read_text().splitlines()]
    (failed,) = [line for line in lines if line["event"] == "write_failed"]
    assert "free space" not in failed["remedy"] and "intact" not in failed["remedy"]
    (told,) = [line for line in lines if line["event"] == "last_policy_not_saved"]
    assert told["level"] == "error" and str(checkpoints) in told["remedy"]

    checkpoints.unlink()
    child = start(node.config_file)
    await asyncio.to_thread(wait_for_a_line, checkpoints / "step-00000001" / "manifest.json")
    assert await ended(child, terminate=True) == 0, "the run goes on, and every batch is trained on again"
    await node.transport.close()


async def test_a_missing_model_ends_the_process_with_its_own_exit_code_and_no_traceback(nodes: Nodes, tmp_path: Path) -> None:
    node = await nodes.node()
    text = node.config_file.read_text().replace(str(nodes.model), str(tmp_path / "nowhere"))
    node.config_file.write_text(text)
    assert await ended(start(node.config_file)) == EXIT_CONFIG
    assert "swarm model init" in node.log() and "Traceback" not in node.log()
    await node.transport.close()

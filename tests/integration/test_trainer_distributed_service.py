"""The trainer service in two processes, against a real nats-server: it trains and publishes, and
all processes end together.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import runpy
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shared.config import NodeConfig, load_config
from shared.config.model_section import ModelSection
from shared.config.trainer_section import TrainerSection
from shared.model.reading import load_tokenizer
from shared.policy_store import open_policy_store
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.forked import SERVER, Forked
from tests.forked_commands import Commands
from tests.integration.trainer_life import checkpoints, final_state, metric_lines, mixed_batch, policy_pointer, set_up, tiny_policy
from tests.integration.trainer_process import Death, arrange, write_config
from tests.integration.trainer_ranks import start_ranks
from tests.unit.supervised import is_running

STEPS = 4
DEADLINE_S = 180.0
LOST = "training processes exited, or did not answer for"


@dataclass
class Node:
    """One node's configuration, streams and folder, with `STEPS` batches in its log."""

    config_file: Path
    config: NodeConfig
    transport: Transport

    @property
    def logs(self) -> str:
        """Of process 0, then what the others put out."""
        files = [self.config.node.run_dir / "trainer.log", *sorted(self.config_file.parent.glob("rank-*.out"))]
        return "\n".join(file.read_text() for file in files if file.exists())

    def start(self, death_of_1: Death | None = None, timeout_s: float = 30.0) -> list[ForkServerProcess]:
        """Two processes, as torchrun would start them. timeout_s: of what they do together."""
        outputs = [str(self.config_file.parent / f"rank-{rank}.out") for rank in range(2)]
        pairs = zip(outputs, [None, death_of_1], strict=True)
        return start_ranks(serve, [(str(self.config_file), output, death, timeout_s) for output, death in pairs])

    def torchrun(self, trainer: Path) -> Forked:
        """Torchrun itself, which starts the program `trainer`."""
        options = ["--standalone", "--nproc-per-node", "2", "--no-python", str(trainer), "--config", str(self.config_file)]
        log = self.config_file.parent / "rank-all.out"
        return Forked("torch.distributed.run", options, environment=dict(os.environ) | SERVER, cwd=Path.cwd(), log=log)

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for something; returns the seconds it took."""
        started = time.monotonic()
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < started + DEADLINE_S, f"not {what} within {DEADLINE_S} s:\n{self.logs[-4000:]}"
            await asyncio.sleep(0.02)
        return time.monotonic() - started

    async def until_trained(self) -> None:
        """Until the log of batches is trained and there is nothing left to do."""
        await self.until(self._is_trained, "trained")

    def _is_trained(self) -> bool:
        metrics = self.config.node.run_dir / "metrics.jsonl"
        written = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        return written >= STEPS and ('"event": "finished"' in self.logs or self.config.trainer.max_steps > STEPS)


def serve(config_file: str, output: str, death: Death | None, timeout_s: float) -> None:
    """The very program that torchrun starts. A file `orphaned` beside the configuration makes the
    launcher look dead.
    """
    orphaned, parent = Path(config_file).with_name("orphaned"), os.getppid()
    os.getppid = lambda: 1 if orphaned.exists() else parent
    if death is not None:
        arrange(death)
    TrainerSection.collective_timeout_s = timeout_s
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = ["trainer", "--config", config_file]
    runpy.run_module("services.trainer", run_name="__main__")


@pytest.fixture
def trainer_program(tmp_path: Path) -> Iterator[Path]:
    """`python -m services.trainer`, forked: two processes would import for four seconds each."""
    commands, program = Commands(tmp_path), tmp_path / "trainer"
    commands.program(program, "services.trainer")
    yield program
    commands.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


NewNode = Callable[..., Awaitable[Node]]


@pytest.fixture
def new_node(nats_url: str, model: Path, tmp_path: Path) -> NewNode:
    numbers = itertools.count(1)

    async def make(max_steps: int = STEPS, checkpoint_every: int = 2) -> Node:
        name = f"several-{tmp_path.name[-20:].strip('_').replace('_', '-').lower()}-{next(numbers)}"
        trainer = f"max_steps = {max_steps}\ncheckpoint_every = {checkpoint_every}"
        file = write_config(
            tmp_path / name / "node.toml", node=name, url=nats_url, model=model, var_dir=tmp_path / name, trainer=trainer
        )
        transport = await connect(nats_url, name=f"test-{name}")
        tokenizer = load_tokenizer(ModelSection(path=str(model)))
        await set_up(transport, [mixed_batch(tokenizer, number) for number in range(1, STEPS + 1)], name)
        return Node(file, load_config(file), transport)

    return make


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(children: list[ForkServerProcess]) -> Callable[[], bool]:
    return lambda: not any(child.is_alive() for child in children)


async def test_under_torchrun_it_trains_publishes_what_it_says_and_ends_in_time_when_it_is_told_to(
    new_node: NewNode, trainer_program: Path, tmp_path: Path
) -> None:
    node = await new_node()
    torchrun = node.torchrun(trainer_program)
    try:
        await node.until_trained()
        pointer = await policy_pointer(node.transport, node.config.node.id)
        assert pointer is not None and pointer.version == STEPS
        store = open_policy_store(node.config.policy_store_uri, node.transport, node.config.node.id)
        fetched = await store.fetch(pointer, tmp_path / "fetched")
        assert hashlib.sha256(fetched.read_bytes()).hexdigest() == pointer.sha256
        checkpoint, _ = checkpoints(node.config).newest()
        assert checkpoint is not None and checkpoint.position.batch_number == STEPS
        published = load_file(fetched)
        assert all((published[name] == value).all() for name, value in checkpoint.state.weights.items())
        assert [line["step"] for line in metric_lines(node.config)] == list(range(1, STEPS + 1))
        assert all(line["updated"] and line["grad_norm"] > 0 for line in metric_lines(node.config))

        trainers = children_of(torchrun.pid)
        assert len(trainers) == 2
        torchrun.send_signal(signal.SIGTERM)
        assert await node.until(lambda: not any(is_running(pid) for pid in trainers), "ended") < 4.0
        await node.until(lambda: torchrun.poll() is not None, "ended")
        assert '"event": "stopped"' in node.logs
        assert "process_lost" not in node.logs and "crashed" not in node.logs
    finally:
        torchrun.kill()
        await node.transport.close()


@pytest.mark.parametrize(("victim", "number"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)])
async def test_a_process_that_is_killed_or_hangs_ends_the_other_with_cause_and_remedy(
    new_node: NewNode, victim: int, number: signal.Signals
) -> None:
    node = await new_node()
    children = node.start(timeout_s=5.0 if number == signal.SIGSTOP else 30.0)
    other = children[1 - victim]
    try:
        await node.until_trained()
        os.kill(children[victim].pid or 0, number)
        assert await node.until(lambda: not other.is_alive(), "ended") < 10.0
        assert other.exitcode == 1
        assert "process_lost" in node.logs and LOST in node.logs and "restart torchrun" in node.logs
    finally:
        for child in children:
            child.kill()
        await node.transport.close()


async def test_killed_in_the_middle_of_a_step_and_started_again_they_end_with_the_same_bits(
    new_node: NewNode,
) -> None:
    states = []
    for death in (None, Death("services.trainer.learner.Learner._update", 3, "before")):
        node = await new_node()
        children = node.start(death)
        if death is not None:
            assert await node.until(gone(children), "ended") < DEADLINE_S
            assert [child.exitcode for child in children] == [1, -signal.SIGKILL]
            assert checkpoints(node.config).steps() == [2] and LOST in node.logs
            children = node.start()
        await node.until_trained()
        children[0].terminate()
        await node.until(gone(children), "ended")
        assert [child.exitcode for child in children] == [0, 0], node.logs
        states.append({name: digest for name, digest in final_state(node.config).items() if not name.startswith("random.")})
        await node.transport.close()
    assert states[0] == states[1]


@pytest.mark.parametrize("reason", ["process 1 is told to stop", "torchrun is gone"])
async def test_whoever_has_a_reason_to_stop_all_stop_in_order(new_node: NewNode, reason: str) -> None:
    node = await new_node(max_steps=100, checkpoint_every=100)
    children = node.start()
    try:
        await node.until_trained()
        if reason == "torchrun is gone":
            node.config_file.with_name("orphaned").touch()
        else:
            children[1].terminate()
        assert await node.until(gone(children), "ended") < 6.0
        assert [child.exitcode for child in children] == [0, 0]
        assert '"event": "stopped"' in node.logs and "process_lost" not in node.logs
        assert checkpoints(node.config).steps() == [STEPS]
    finally:
        for child in children:
            child.kill()
        await node.transport.close()

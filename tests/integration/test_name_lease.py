"""One life, one name: real trainers on a real server, of which one too many is started, killed or
suspended.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from shared.config import NodeConfig, load_config
from shared.config.model_section import ModelSection
from shared.contracts.codec import decode
from shared.contracts.control import LeaseRecord, ServiceStatus
from shared.contracts.messages import Batch
from shared.contracts.subjects import SOLE_REPLICA, TRAINER_KEY, lease_key, node_bucket, status_key
from shared.model.reading import load_tokenizer
from shared.runtime import EXIT_CONFIG
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.constants import with_constants
from tests.integration.trainer_life import mixed_batch, put_batches, set_up, tiny_policy, trainer_position
from tests.integration.trainer_process import start, write_config

DEADLINE_S = 180.0
LEASE_S = 3.0


class Server:
    """Where the trainers of one test meet, and what they are started with."""

    def __init__(self, url: str, folder: Path, model: Path, batches: list[Batch]) -> None:
        self._url, self._folder, self._model, self._batches = url, folder, model, batches
        self.node = folder.name.replace("_", "-")[:31].strip("-").lower()
        self._children: list[ForkServerProcess] = []
        self._given = 0

    async def open(self) -> Server:
        self.plane = await connect(self._url, name="test")
        await set_up(self.plane, node=self.node)
        return self

    async def close(self) -> None:
        for child in self._children:
            child.kill()
            await asyncio.to_thread(child.join, DEADLINE_S)
        await self.plane.close()

    def config(self, machine: str, run: str = "first", lease_s: float = LEASE_S) -> NodeConfig:
        """The node as it is set up on one machine: each has a folder of its own."""
        folder = self._folder / machine
        file = folder / f"{run}.toml"
        write_config(file, node=self.node, url=self._url, model=self._model, var_dir=folder, trainer="checkpoint_every = 1")
        file.write_text(file.read_text().replace('run = "test"', f'run = "{run}"'))
        return with_constants(load_config(file), node={"lease_s": lease_s})

    def start(self, config: NodeConfig) -> ForkServerProcess:
        child = start(config.node.var_dir / f"{config.node.run}.toml", lease_s=config.node.lease_s)
        self._children.append(child)
        return child

    async def trains(self, child: ForkServerProcess) -> None:
        """Give the node one batch more and wait until it is trained on."""
        batch = self._batches[self._given]
        self._given += 1
        await put_batches(self.plane, [batch], self.node)

        async def there() -> bool:
            assert child.is_alive(), "the trainer ended"
            found = await trainer_position(self.plane, self.node)
            return found is not None and found.policy_version == self._given

        await until(there)

    async def holder(self) -> LeaseRecord | None:
        entry = await self.plane.kv.get(node_bucket(self.node), lease_key("trainer"))
        return decode(entry.value, LeaseRecord) if entry is not None else None

    async def held_by(self, child: ForkServerProcess) -> None:
        async def so() -> bool:
            found = await self.holder()
            return found is not None and found.pid == child.pid

        await until(so)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline, f"not so within {DEADLINE_S:g} s"
        await asyncio.sleep(0.02)


async def code_of(child: ForkServerProcess) -> int | None:
    await asyncio.to_thread(child.join, DEADLINE_S)
    return child.exitcode


def said(config: NodeConfig, child: ForkServerProcess, event: str) -> list[dict[str, Any]]:
    """Return what this process wrote into its log under `event`."""
    lines = [json.loads(line) for line in (config.node.run_dir / "trainer.log").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Batch]]]:
    folder = tiny_policy(tmp_path_factory.mktemp("lease") / "model")
    tokenizer = load_tokenizer(ModelSection(path=str(folder)))
    yield folder, [mixed_batch(tokenizer, number) for number in range(1, 5)]


@pytest.fixture
def server(nats_url: str, tmp_path: Path, model: tuple[Path, list[Batch]]) -> Callable[[], Any]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Server]:
        found = await Server(nats_url, tmp_path, *model).open()
        try:
            yield found
        finally:
            await found.close()

    return opened


async def test_a_newcomer_of_the_same_name_is_refused_with_the_remedy_and_the_running_node_trains_on(server: Any) -> None:
    async with server() as here:
        first, other_run, same_run = here.config("one"), here.config("two", run="second"), here.config("two")
        running = here.start(first)
        await here.trains(running)

        newcomer = here.start(other_run)
        assert await code_of(newcomer) == EXIT_CONFIG
        [told] = said(other_run, newcomer, "cannot_go_on")
        assert f"the name {here.node} is taken" in told["reason"] and "belong to run first" in told["reason"]
        assert "node.id" in told["reason"] and "--run first" in told["reason"]

        twin = here.start(same_run)
        assert await code_of(twin) == EXIT_CONFIG
        [told] = said(same_run, twin, "cannot_go_on")
        assert "has a running trainer already" in told["reason"] and f"process {running.pid} on" in told["reason"]

        await here.trains(running)
        assert not said(first, running, "cannot_go_on")


async def test_a_second_process_in_the_same_folder_is_refused(server: Any) -> None:
    async with server() as here:
        config = here.config("one")
        running = here.start(config)
        await here.trains(running)
        second = here.start(config)
        assert await code_of(second) == EXIT_CONFIG
        [told] = said(config, second, "cannot_go_on")
        assert f"process {running.pid} on" in told["reason"] and "node.var_dir" in told["reason"]
        await here.trains(running)


async def test_a_run_that_was_killed_goes_on_without_waiting_for_its_own_lease(server: Any) -> None:
    async with server() as here:
        config = here.config("one", lease_s=600.0)
        running = here.start(config)
        await here.trains(running)
        running.kill()
        assert await code_of(running) == -signal.SIGKILL
        again = here.start(config)
        await here.held_by(again)
        await here.trains(again)
        assert not said(config, again, "waiting_for_the_name")
        again.terminate()
        assert await code_of(again) == 0
        left = await here.holder()
        assert left is not None and left.released


async def test_a_suspended_holder_that_lost_its_lease_writes_nothing_when_it_comes_back_and_says_why(server: Any) -> None:
    async with server() as here:
        lost, taken = here.config("one"), here.config("two")
        suspended = here.start(lost)
        await here.trains(suspended)
        os.kill(suspended.pid, signal.SIGSTOP)
        successor = here.start(taken)

        async def waits() -> bool:
            entry = await here.plane.kv.get(node_bucket(here.node), status_key("trainer", SOLE_REPLICA))
            status = decode(entry.value, ServiceStatus) if entry is not None else None
            told = re.compile(rf"waiting until \d\d:\d\d:\d\d UTC for the lease of process {suspended.pid} on ")
            return status is not None and status.pid == successor.pid and told.match(status.state) is not None

        await until(waits)
        await here.held_by(successor)
        assert said(taken, successor, "waiting_for_the_name")
        await here.trains(successor)
        before = await written(here.plane, here.node)

        os.kill(suspended.pid, signal.SIGCONT)
        assert await code_of(suspended) == EXIT_CONFIG
        [told] = said(lost, suspended, "cannot_go_on")
        assert f"process {successor.pid} on" in told["reason"] and "suspended or cut off" in told["reason"]
        assert await written(here.plane, here.node) == before
        await here.trains(successor)


async def written(plane: Transport, node: str) -> dict[str, int]:
    """Revisions of what a trainer writes."""
    found = {key: await plane.kv.get(node_bucket(node), key) for key in (TRAINER_KEY, "policy", "findings")}
    return {key: entry.revision for key, entry in found.items() if entry is not None}

"""Turns on a shared device: one holder at a time, everybody's turn comes, and nobody who died or
gave up keeps others out.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.generator import engines
from services.generator.engines import TurnTakingEngine
from services.generator.engines.base import Engine, EngineError, Sample, SamplingParams
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.device_turns import DeviceTurns, TurnError, device_turns, turns_file

_HOLDER = """
import asyncio, sys, time
from pathlib import Path
from shared.device_turns import DeviceTurns

asyncio.run(DeviceTurns(Path(sys.argv[1]), "other process").take())
print("has it", flush=True)
time.sleep(60)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "device.turns"


@pytest.mark.slow
async def test_two_who_always_want_it_take_turns(file: Path) -> None:
    seen: list[str] = []

    async def work(name: str) -> None:
        mine = DeviceTurns(file, name)
        for _ in range(10):
            async with mine.turn():
                seen.append(name)
                await asyncio.sleep(0.05)
                seen.append(name)

    await asyncio.gather(work("generator"), work("trainer"))

    turns = seen[::2]
    assert turns == seen[1::2], "somebody else came in during a turn"
    assert max(len(list(row)) for _, row in itertools.groupby(turns[:-2])) <= 2, turns


@pytest.mark.slow
@pytest.mark.parametrize("names", ["abc", "abcde"])
async def test_of_more_than_two_nobody_comes_again_before_all_others_have_come(file: Path, names: str) -> None:
    seen: list[str] = []

    async def work(name: str) -> None:
        mine = DeviceTurns(file, name)
        while len(seen) < 8 * len(names):
            async with mine.turn():
                seen.append(name)
                await asyncio.sleep(0.06)

    await asyncio.wait_for(asyncio.gather(*map(work, names)), 120)

    gaps = {name: [b - a for a, b in itertools.pairwise(place for place, who in enumerate(seen) if who == name)] for name in names}
    # Who waits at the door is chance; that nobody is passed over again and again is not.
    assert max(max(gap) for gap in gaps.values()) <= 3 * len(names), (gaps, seen)
    assert min(seen.count(name) for name in names) >= 4, seen


@pytest.mark.slow
async def test_who_is_killed_holds_nobody_up(file: Path) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _HOLDER, str(file), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"has it\n"
        mine = DeviceTurns(file, "me")
        waiting = asyncio.create_task(mine.take())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert "other process" in read(file)
    finally:
        process.kill()
        await process.wait()
    assert await asyncio.wait_for(waiting, 120) >= 0.2
    assert read(file) == f"me (process {os.getpid()})"
    mine.give_up()


def read(file: Path) -> str:
    return file.read_text("utf-8")


async def test_a_process_forked_during_a_turn_does_not_keep_it(file: Path) -> None:
    mine, other = DeviceTurns(file, "generator"), DeviceTurns(file, "trainer")
    await mine.take()
    with a_forked_process():
        mine.give_up()
        await asyncio.wait_for(other.take(), 120)
        other.give_up()


@contextmanager
def a_forked_process() -> Iterator[None]:
    """One that has all open files of this one, and keeps them open."""
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("fault", ["folder", "link", "gone"])
async def test_a_file_that_cannot_be_locked_is_said_with_the_remedy(tmp_path: Path, fault: str) -> None:
    file = tmp_path / ("gone/device.turns" if fault == "gone" else "device.turns")
    if fault == "folder":
        file.mkdir()
    elif fault == "link":
        file.symlink_to(tmp_path / "elsewhere")
    turns = DeviceTurns(file, "me")
    with pytest.raises(TurnError, match="check node.var_dir, or unset model.device_turns"):
        await turns.take()
    assert not (tmp_path / "elsewhere").exists()
    if fault != "gone":
        assert not turns.wanted(), "it stands in nobody's way"


async def test_who_stops_waiting_leaves_the_door_open(file: Path) -> None:
    holder, impatient, third = (DeviceTurns(file, name) for name in ("holder", "impatient", "third"))
    await holder.take()
    waiting = asyncio.create_task(impatient.take())
    await asyncio.sleep(0.05)
    assert holder.wanted()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not holder.wanted()
    next_one = asyncio.create_task(third.take())
    await asyncio.sleep(0.05)
    holder.give_up()
    await asyncio.wait_for(next_one, 120)
    third.give_up()
    third.give_up()


def test_one_file_a_device_and_choice_of_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both = turns_file(tmp_path, "cuda:0")
    assert both == tmp_path / "device-cuda_0.turns"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,../2")
    assert turns_file(tmp_path, "cuda:0") == tmp_path / "device-cuda_0-1____2.turns"


def test_turns_are_off_unless_asked_for(tmp_path: Path) -> None:
    def config(on: bool) -> NodeConfig:
        node = {"id": "alpha", "var_dir": str(tmp_path / "new")}
        return NodeConfig.model_validate({"tasks": [{"dataset": "gcd"}], "node": node, "model": {"device_turns": on}})

    assert device_turns(config(False), "trainer") is None
    assert not (tmp_path / "new").exists()
    assert device_turns(config(True), "trainer") is not None
    assert (tmp_path / "new").is_dir()


class RecordingEngine(Engine):
    """Writes down what it is asked, and takes a while over a call. Not a mock of a model: nothing
    is sampled.
    """

    name = "recording"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running = 0
        self.fails_to_wake = False
        self.wakes_in_s = self.rests_in_s = 0.0

    async def start(self) -> None:
        self.events.append("start")

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        self.running += 1
        self.events.append("generate")
        await asyncio.sleep(0.05)
        self.running -= 1
        return []

    async def load_policy(self, weights_file: Path, version: int) -> None:
        self.events.append("load")
        self.policy_version = version

    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        raise RuntimeError("broken")

    async def rest(self) -> None:
        assert not self.running
        await asyncio.sleep(self.rests_in_s)
        self.events.append("rest")

    async def wake(self) -> None:
        self.events.append("wake")
        await asyncio.sleep(self.wakes_in_s)
        if self.fails_to_wake:
            raise EngineError("no memory")

    async def close(self) -> None:
        self.events.append("close")


async def generate(engine: Engine) -> None:
    async with engine.turn():
        await engine.generate([], 1, SamplingParams(), seed=0)


def is_free(file: Path) -> bool:
    with file.open("a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.slow
async def test_calls_side_by_side_share_a_turn_until_somebody_wants_the_device(file: Path) -> None:
    inner = RecordingEngine()
    engine = TurnTakingEngine(inner, DeviceTurns(file, "generator"))
    async with engine.turn():
        await engine.start()
    assert inner.events == ["wake", "start", "rest"]
    inner.events.clear()

    await asyncio.gather(*(generate(engine) for _ in range(3)))
    assert inner.events == ["wake", "generate", "generate", "generate", "rest"]
    inner.events.clear()

    async def keep_calling() -> None:
        while True:
            await generate(engine)

    calling = [asyncio.create_task(keep_calling()) for _ in range(3)]
    await asyncio.sleep(0.12)
    async with asyncio.timeout(120), DeviceTurns(file, "trainer").turn():
        assert inner.running == 0
        count = len(inner.events)
        await asyncio.sleep(0.2)
        assert len(inner.events) == count, "it computed in another's turn"
    await asyncio.sleep(0.2)
    assert len(inner.events) > count
    await cancel_and_wait(*calling)


async def test_a_call_outside_of_a_turn_is_refused(file: Path) -> None:
    engine = TurnTakingEngine(RecordingEngine(), DeviceTurns(file, "generator"))
    for call in (engine.start(), engine.load_policy(Path("x"), 1), engine.generate([], 1, SamplingParams(), seed=0)):
        with pytest.raises(EngineError, match="outside a turn"):
            await call


async def test_what_fails_ends_the_turn_too(file: Path) -> None:
    inner = RecordingEngine()
    engine = TurnTakingEngine(inner, DeviceTurns(file, "generator"))
    with pytest.raises(RuntimeError, match="broken"):
        async with engine.turn():
            await engine.score([], [], SamplingParams())
    inner.fails_to_wake = True
    inner.events.clear()
    with pytest.raises(EngineError, match="no memory"):
        await generate(engine)
    assert inner.events == ["wake", "rest"], "half awake, perhaps"
    inner.fails_to_wake = False
    async with engine.turn():
        await engine.load_policy(Path("x"), 7)
    assert engine.policy_version == 7
    assert is_free(file)


@pytest.mark.slow
@pytest.mark.parametrize("during", ["wake", "rest"])
async def test_a_deadline_that_strikes_while_the_engine_wakes_or_rests_leaves_it_resting(file: Path, during: str) -> None:
    inner = RecordingEngine()
    engine = TurnTakingEngine(inner, DeviceTurns(file, "generator"))
    inner.rests_in_s, inner.wakes_in_s = (0.3, 0.0) if during == "rest" else (0.1, 0.3)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await generate(engine)
    if during == "rest":
        assert not is_free(file)
        assert "rest" not in inner.events
    await asyncio.wait_for(generate(engine), 120)
    assert inner.events[-3:] == ["wake", "generate", "rest"]
    assert inner.events.count("rest") == inner.events.count("wake") == 2
    assert is_free(file)


async def test_an_engine_that_does_not_come_to_rest_keeps_the_device_until_the_process_ends(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_REST_S", 0.1)
    inner = RecordingEngine()
    engine = TurnTakingEngine(inner, DeviceTurns(file, "generator"))
    inner.rests_in_s = 5.0
    with pytest.raises(EngineError, match="still computing"):
        await generate(engine)
    assert not is_free(file)
    inner.rests_in_s = 0.0
    with pytest.raises(EngineError, match="still computing"):
        await generate(engine)
    await engine.close()
    assert not is_free(file)


async def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    engine = TurnTakingEngine(RecordingEngine(), DeviceTurns(tmp_path / "gone" / "device.turns", "generator"))
    with pytest.raises(EngineError, match="device_turns"):
        await generate(engine)

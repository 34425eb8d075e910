"""Five processes that want one name, of which some are always suspended, cut off or both: whoever
has written under a lease after another one is the only one that ever writes again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import TRAINER_KEY, node_bucket
from shared.transport.base import Transport, bucket_stream
from shared.transport.connect import connect
from tests.integration.lease_contenders import NODE
from tests.integration.line import Line
from tests.long_forms import FULL
from tests.nats_server import NatsServer

CONTENDERS = 5
LEASE_S = 2.0
SECONDS = float(os.environ.get("LEASE_ATTACK_S", "25" if FULL else "15"))
LIVES = 4
"""So many have to have written for the test to say anything."""

pytestmark = pytest.mark.slow


@contextmanager
def contenders(folder: Path, urls: list[str]) -> Iterator[list[int]]:
    """Their process ids."""
    command = [sys.executable, "-m", "tests.integration.lease_contenders", str(folder), str(LEASE_S), *urls]
    with subprocess.Popen(command, start_new_session=True) as parent:
        try:
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
            deadline = time.monotonic() + 60.0
            while len(found := [int(pid) for pid in children.read_text().split()]) < len(urls):
                assert time.monotonic() < deadline and parent.poll() is None
                time.sleep(0.05)
            yield found
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


async def attack(rng: random.Random, pid: int, line: Line) -> None:
    """Again and again: suspended, cut off, or both, for less or more than a lease."""
    while True:
        await asyncio.sleep(rng.uniform(0.2, 2.0) * LEASE_S)
        stopped, cut = rng.choice([(True, False), (False, True), (True, True)])
        if cut:
            line.whole.clear()
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(rng.choice([0.3, 1.2, 2.5]) * LEASE_S)
        # Which comes first decides whether what it sent before arrives before it can look again.
        for what in rng.sample(["line", "process"], 2):
            if what == "line":
                line.whole.set()
            else:
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(rng.choice([0.0, 0.05]))


async def stored(plane: Transport, seconds: float) -> dict[int, str]:
    """The values that the position had, by their place in the stream: those too whose writer never
    heard of it. On a machine so slow that few have written by then it goes on for longer.
    """
    stream, subject = bucket_stream(node_bucket(NODE)), f"$KV.{node_bucket(NODE)}.{TRAINER_KEY}"
    found, next_seq = dict[int, str](), 1
    started, enough = time.monotonic(), False
    while (waited := time.monotonic() - started) < seconds or (not enough and waited < 6 * seconds):
        for message in await plane.read(stream, next_seq, 256):
            next_seq = message.seq + 1
            if message.subject == subject and message.inline:
                found[message.seq] = message.inline.decode()
        enough = len({value.split()[0] for value in found.values()}) >= LIVES
        await asyncio.sleep(0.02)
    return found


def acknowledged(folder: Path) -> dict[int, str]:
    """The same, as the writers say it; without those that wait to be told."""
    lines = [line.split(maxsplit=1) for file in folder.glob("*.log") for line in file.read_text().splitlines()]
    return {int(seq): value for seq, value in lines}


@pytest.mark.deadline(7 * SECONDS + 120)
async def test_no_life_writes_after_another_one_has(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats").start()
    lines = [await Line(server.port).open() for _ in range(CONTENDERS)]
    plane = await connect(server.url, name="test")
    try:
        await plane.kv.ensure(node_bucket(NODE), history=64)
        await ensure_node_streams(plane, NODE)
        (tmp_path / "logs").mkdir()
        with contenders(tmp_path / "logs", [line.url for line in lines]) as pids:
            seed = int(os.environ.get("LEASE_ATTACK_SEED", "1"))
            attacks = [
                asyncio.create_task(attack(random.Random(100 * seed + number), pid, line))
                for number, (pid, line) in enumerate(zip(pids, lines, strict=True))
            ]
            seen = await stored(plane, SECONDS)
            for each in attacks:
                each.cancel()
            assert not [each for each in attacks if each.done() and not each.cancelled() and each.exception()]
    finally:
        for line in lines:
            line.close()
        await plane.close()
        server.stop()
    told = acknowledged(tmp_path / "logs")
    assert not {seq for seq in seen.keys() & told.keys() if seen[seq] != told[seq]}
    lives, life, last = list[str](), "", 0
    for seq, value in sorted({**seen, **told}.items()):
        writer, number = value.split()[0], int(value.split()[1])
        if writer != life:
            assert writer not in lives, f"{value} at {seq}: after {life}, which had followed it"
            lives.append(writer)
        else:  # whoever takes over writes the former one's last word again
            assert number >= last, f"{value} at {seq}: older than {last}"
        life, last = writer, number
    print(
        f"{len(lives)} lives in {SECONDS:.0f} s, {len(told)} positions acknowledged, {len(seen.keys() - told.keys())} others seen"
    )
    assert len(lives) >= LIVES

"""Streams, disks and messages that are full or too large: a clear error or back-pressure, counted,
and recovery when it clears.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.contracts import subjects
from shared.contracts.streams import ensure_node_streams, node_streams
from shared.transport.base import StreamFull, StreamSpec, TooLarge, Transport, TransportError
from shared.transport.connect import connect
from shared.transport.nats.pull import fetch
from tests.chaos.figures import Row, note
from tests.chaos.publishing import SUBJECT, load_stream, lost_and_duplicated, stored_ids
from tests.full_disk import can_mount
from tests.nats_server import NatsServer, find_binary

DISK_BYTES = 24 * 2**20
BALLAST_BYTES = 8 * 2**20


class SmallDisk(NatsServer):
    """A server whose store is a file system of 24 MB that nobody else sees. It outlives the server,
    as a disk does.
    """

    def start(self) -> SmallDisk:
        """Start (again) on the same small disk."""
        if not hasattr(self, "_holder"):
            store = self.folder / "store"
            store.mkdir()
            script = f"mount -t tmpfs -o size={DISK_BYTES} none {store} && echo mounted && exec sleep 600"
            command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script]
            self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert self._holder.stdout is not None
            assert self._holder.stdout.readline() == b"mounted\n"
            self.disk = Path(f"/proc/{self._holder.pid}/root{store}")
        spaces = f"/proc/{self._holder.pid}/ns"
        enter = ["nsenter", f"--user={spaces}/user", f"--mount={spaces}/mnt", "--preserve-credentials"]
        run = [find_binary(), "-c", str(self._config_file), "-p", str(self.port), "-sd", str(self.folder / "store")]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen([*enter, *run], stdout=log, stderr=subprocess.STDOUT)
        self.wait_until_it_answers()
        return self

    def wait_until_it_answers(self) -> None:
        """The server sends INFO to whoever connects."""

        async def hello() -> bool:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return False
            found = await reader.read(4) == b"INFO"
            writer.close()
            return found

        deadline = time.monotonic() + 15
        while not asyncio.run(hello()):
            assert time.monotonic() < deadline, self.log_file.read_text()[-2000:]
            time.sleep(0.05)

    def destroy(self) -> None:
        """End the server and its disk."""
        self.kill()
        self._holder.kill()
        self._holder.wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    server = SmallDisk(tmp_path / "nats", jetstream="sync_interval: always").start()
    yield server
    server.destroy()


async def _publish_until_refused(transport: Transport, acknowledged: list[str], most: int) -> TransportError:
    for number in range(len(acknowledged), len(acknowledged) + most):
        message_id = f"m-{number}"
        payload = message_id.encode() + b"." * 100_000
        try:
            await transport.publish(SUBJECT, payload, stream="CHAOS_LOAD", message_id=message_id, timeout_s=3.0)
        except TransportError as error:
            return error
        acknowledged.append(message_id)
    raise AssertionError(f"{most} messages fit on the disk")


@pytest.mark.skipif(not can_mount(), reason="no small file system can be mounted here")
def test_a_full_disk_is_a_clear_error_and_takes_nothing_that_was_acknowledged(small_disk: SmallDisk) -> None:
    ballast = small_disk.disk / "ballast"
    ballast.write_bytes(b"\0" * BALLAST_BYTES)
    acknowledged: list[str] = []

    async def fill() -> TransportError:
        transport = await connect(small_disk.url, name="disk")
        await transport.ensure_stream(load_stream())
        error = await _publish_until_refused(transport, acknowledged, 1000)
        await transport.close()
        return error

    async def works_again() -> bool:
        transport = await connect(small_disk.url, name="disk")
        try:
            await transport.publish(SUBJECT, b"again", stream="CHAOS_LOAD", message_id="again", timeout_s=3.0)
        except TransportError:
            return False
        finally:
            await transport.close()
        return True

    async def after() -> tuple[int, int]:
        transport = await connect(small_disk.url, name="disk")
        deadline = time.monotonic() + 15
        while True:
            try:
                stored = await stored_ids(transport)
                number = f"m-{len(acknowledged)}"
                await transport.publish(SUBJECT, number.encode(), stream="CHAOS_LOAD", message_id=number)
                break
            except TransportError:
                assert time.monotonic() < deadline, "no recovery after the disk was freed and the server restarted"
        await transport.close()
        return lost_and_duplicated(acknowledged, stored)

    error = asyncio.run(fill())
    ballast.unlink()
    by_itself = asyncio.run(works_again())
    started = time.monotonic()
    small_disk.restart()
    lost, duplicated = asyncio.run(after())
    note(
        Row(
            fault="full disk under the server",
            injected=1,
            counted="messages published",
            sent=len(acknowledged),
            lost=lost,
            duplicated=duplicated,
            refused={type(error).__name__: 1},
            recovery_s=[time.monotonic() - started],
            remark=f"goes on as soon as there is space: {'yes' if by_itself else 'no, the server must be started again'}",
        )
    )
    assert len(acknowledged) > 50
    assert (lost, duplicated) == (0, 0)
    assert "CHAOS_LOAD" in str(error)
    assert "disk" in str(error)


async def test_a_full_queue_pushes_back_and_every_group_gets_through_in_the_end(nats_url: str) -> None:
    transport = await connect(nats_url, name="full")
    await ensure_node_streams(transport, "full-queue")
    stream, subject = subjects.node_rollouts_stream("full-queue"), subjects.node_rollouts("full-queue")
    (spec,) = (each for each in node_streams("full-queue") if each.name == stream)
    await transport.ensure_stream(replace(spec, max_msgs=10))
    refused, wanted = 0, 60
    taken: list[bytes] = []

    async def publish() -> None:
        nonlocal refused
        for number in range(wanted):
            while True:
                try:
                    await transport.publish(subject, b"%d" % number, stream=stream, message_id=f"draw-{number}")
                    break
                except StreamFull as error:
                    assert "reader is behind" in str(error)
                    refused += 1
                    await asyncio.sleep(0.02)

    async def take() -> None:
        await asyncio.sleep(0.3)
        while len(taken) < wanted:
            for delivery in await fetch(transport, stream, subjects.VERIFIER_CONSUMER, 5, 1.0):
                taken.append(await transport.payload(delivery.message))
                await delivery.ack()

    await asyncio.wait_for(asyncio.gather(publish(), take()), 120)
    await transport.close()
    note(
        Row(
            fault="full work queue (discard: new)",
            injected=1,
            counted="groups published",
            sent=wanted,
            lost=wanted - len(set(taken)),
            duplicated=len(taken) - len(set(taken)),
            refused={"StreamFull": refused},
            remark="the publisher waits and tries again",
        )
    )
    assert refused > 0
    assert sorted(taken, key=int) == [b"%d" % number for number in range(wanted)]


async def test_a_message_over_its_streams_limit_is_refused_whole_and_one_over_the_servers_limit_passes(nats_url: str) -> None:
    transport = await connect(nats_url, name="large")
    spec = StreamSpec(name="CHAOS_LARGE", subjects=("chaos.large",), max_msg_bytes=4 * 2**20)
    await transport.ensure_stream(spec)
    with pytest.raises(TooLarge, match="CHAOS_LARGE"):
        await transport.publish("chaos.large", b"x" * (4 * 2**20 + 1), stream="CHAOS_LARGE", message_id="over")
    assert (await transport.stream_state("CHAOS_LARGE")).messages == 0
    in_chunks = b"y" * (3 * 2**20)
    ack = await transport.publish("chaos.large", in_chunks, stream="CHAOS_LARGE", message_id="chunks")
    message = await transport.get("CHAOS_LARGE", ack.seq)
    assert message is not None
    assert message.inline is None
    assert await transport.payload(message) == in_chunks
    await transport.close()
    note(
        Row(
            fault="message over the limit",
            injected=1,
            refused={"TooLarge": 1},
            remark="3 MB passed a server whose largest message is 1 MB; 4 MB + 1 were over the stream's limit",
        )
    )

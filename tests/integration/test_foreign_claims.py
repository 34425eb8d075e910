"""References to payloads as a member of the swarm with a valid key may write them: what they cost
those who read them.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.verifier.fair_queue import NODE_BYTES, SENDER_BYTES, InFlightLimit, turns_of
from shared.contracts import subjects
from shared.identity.keys import SigningKey, new_seed
from shared.transport.base import BadReference, StoredMessage, Transport, TransportError
from shared.transport.blobs import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    SEAL_BYTES,
    Reference,
    companion_name,
    companion_subject,
    sealed,
)
from shared.transport.connect import connect
from tests.integration.nats_transports import LossyProxy
from tests.integration.running_verifier import configured, until, verifier
from tests.integration.test_verifier_trust import share
from tests.integration.transport_planes import Body, Plane
from tests.long_forms import FULL
from tests.nats_server import NatsServer, delete_message

NO_SEAL = "00" * SEAL_BYTES

MakeServer = Callable[..., NatsServer]
MIB = 2**20
LARGE = 48 if FULL else 24
CHUNKS = companion_name(subjects.SWARM_ROLLOUTS)
MALLORY = subjects.rollouts("mallory")


async def store_chunks(transport: Any, stream: str, subject: str, chunks: list[bytes]) -> list[int]:
    slots = asyncio.Semaphore(64)

    async def one(chunk: bytes) -> int:
        async with slots:
            return int(
                await transport.chunks.put_chunk(companion_subject(subject), chunk, stream=companion_name(stream), timeout_s=20)
            )

    return await asyncio.gather(*(one(chunk) for chunk in chunks))


async def refer(
    transport: Transport,
    stream: str,
    subject: str,
    size_bytes: int,
    runs: str,
    digest: str = "0" * 64,
    name: str = "r",
    seal: str = NO_SEAL,
) -> StoredMessage:
    headers = {"Swarm-Blob": f"{size_bytes} {digest} {runs} {seal}"}
    ack = await transport.publish(subject, b"", stream=stream, message_id=name, headers=headers)
    message = await transport.get(stream, ack.seq)
    assert message is not None
    return message


class Counting:
    """Counts the bytes that a transport's reads of chunks bring, by putting itself before them."""

    def __init__(self, transport: Any) -> None:
        self.read_bytes = 0
        self.reads = 0
        self._read = transport.chunks.read
        transport.chunks.read = self.read

    async def read(self, *arguments: Any, **options: Any) -> list[StoredMessage]:
        messages: list[StoredMessage] = await self._read(*arguments, **options)
        self.reads += 1
        self.read_bytes += sum(len(message.inline or b"") for message in messages)
        return messages


@pytest.mark.parametrize("claimed_bytes", [100, 40_000, 1_000_000])
@pytest.mark.parametrize("runs", ["1-30", "1-2", ",".join(map(str, range(30, 0, -1))), ",".join(["1"] * 30)])
async def test_a_small_claim_to_large_chunks_reads_at_most_the_claim_and_one_chunk(
    over: Callable[[Body], Any],
    claimed_bytes: int,
    runs: str,
) -> None:
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        subject = f"{plane.tag}.log.a"
        await store_chunks(transport, spec.name, subject, [bytes(MAX_CHUNK_BYTES)] * 30)
        message = await refer(transport, spec.name, subject, claimed_bytes, runs)
        counting = Counting(transport)
        with pytest.raises(BadReference):
            await transport.payload(message)
        assert counting.read_bytes <= claimed_bytes + MAX_CHUNK_BYTES

    await over(body)


@pytest.mark.parametrize("runs", ["1-1000000000000", "5-6", "5,7", "9,5-6"])
def test_a_reference_of_more_chunks_than_its_size_allows_is_no_reference(runs: str) -> None:
    """Decided by arithmetic, before a list of them is made."""
    with pytest.raises(BadReference, match="more chunks than its size allows"):
        Reference.parse(f"{MIN_CHUNK_BYTES if ',5-6' not in runs else 2 * MIN_CHUNK_BYTES} {'0' * 64} {runs} {NO_SEAL}")


async def test_a_claim_of_many_tiny_chunks_ends_with_the_first(over: Callable[[Body], Any]) -> None:
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        subject = f"{plane.tag}.log.a"
        await store_chunks(transport, spec.name, subject, [b"x"] * 200)
        counting = Counting(transport)
        scattered = ",".join(map(str, range(200, 0, -1)))
        for claimed_bytes in (200, 200 * MIN_CHUNK_BYTES):
            message = await refer(transport, spec.name, subject, claimed_bytes, scattered, name=f"{claimed_bytes}")
            with pytest.raises(BadReference):
                await transport.payload(message)
        assert counting.reads <= 1

    await over(body)


async def test_chunks_that_another_sender_stored_are_refused(over: Callable[[Body], Any]) -> None:
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        payload = random.Random(0).randbytes(3_000_000)
        await transport.publish(f"{plane.tag}.log.a", payload, stream=spec.name, message_id="1")
        [honest] = await transport.read(spec.name, 1, 1)
        await transport.publish(
            f"{plane.tag}.log.b", b"", stream=spec.name, message_id="2", headers={"Swarm-Blob": honest.headers["Swarm-Blob"]}
        )
        stolen = await transport.get(spec.name, 2)
        assert stolen is not None
        with pytest.raises(BadReference, match="is stored under"):
            await transport.payload(stolen)
        assert await transport.payload(honest) == payload

    await over(body)


async def test_a_chunk_that_goes_while_its_blob_is_read_ends_the_reading(over: Callable[[Body], Any]) -> None:
    """What fills a stream can push chunks out of it at any moment; what is stored cannot be
    changed.
    """

    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        subject = f"{plane.tag}.log.a"
        payload = random.Random(0).randbytes(4 * MIN_CHUNK_BYTES)
        hidden, seal = sealed(payload)
        first, second, third, last = (hidden[start : start + MIN_CHUNK_BYTES] for start in range(0, len(hidden), MIN_CHUNK_BYTES))
        stored = await store_chunks(transport, spec.name, subject, [first, third, second, last])
        order = (stored[0], stored[2], stored[1], stored[3])
        _, digest, runs, letters = Reference(len(payload), hashlib.sha256(payload).hexdigest(), order, seal).header().split(" ")
        message = await refer(transport, spec.name, subject, len(payload), runs, digest, seal=letters)
        assert await transport.payload(message) == payload
        counting = Counting(transport)
        plain = counting.read

        async def read(*arguments: Any, **options: Any) -> list[StoredMessage]:
            if counting.reads == 2:
                await delete_message(transport, companion_name(spec.name), stored[3])
            return await plain(*arguments, **options)

        transport.chunks.read = read  # type: ignore[attr-defined]
        with pytest.raises(TransportError, match="is gone"):
            await transport.payload(message)

    await over(body)


class SlowProxy(LossyProxy):
    """Between client and server: each packet of the server's comes late, as over a line of long
    round trips.
    """

    delay_s = 0.0

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, replies: bool) -> None:
        while read := await source.read(65536):
            await asyncio.sleep(self.delay_s if replies else 0.0)
            sink.write(read)
            await sink.drain()


async def test_a_blob_that_trickles_ends_at_one_deadline_for_the_whole(nats_server: MakeServer) -> None:
    """60 runs of one chunk, each answered within its own deadline: two minutes if each had one."""
    server = nats_server()
    proxy = SlowProxy(server.port)
    async with proxy:
        near = await connect(server.url, name="near")
        far = await connect(f"nats://127.0.0.1:{proxy.port}", name="far")
        spec = await Plane(server.url, "slow", None).log(near)  # type: ignore[arg-type]
        stored = await store_chunks(near, spec.name, "slow.log.a", [bytes(MIN_CHUNK_BYTES)] * 60)
        size, runs = 60 * MIN_CHUNK_BYTES, ",".join(map(str, reversed(stored)))
        message = await refer(near, spec.name, "slow.log.a", size, runs, hashlib.sha256(bytes(size)).hexdigest())
        assert await far.payload(message) == bytes(size)
        proxy.delay_s = 1.0
        async with asyncio.timeout(90):
            with pytest.raises(TransportError, match="did not arrive within 6.9"):
                await far.payload(message)
        await near.close()
        await far.close()


async def test_references_that_cost_much_hold_up_nobody_else_and_are_counted_under_their_sender(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    """More than can be in work at once, of 4,096 one-byte chunks in as many runs."""
    config = configured("alpha", nats_server().url, tmp_path, intake_groups_per_s=400.0)
    key = SigningKey(new_seed())
    async with verifier(config) as alpha:
        mallory = await connect(config.nats.node_url, name="mallory")
        stored = await store_chunks(mallory, subjects.SWARM_ROLLOUTS, MALLORY, [b"x"] * 4096)
        runs = ",".join(map(str, reversed(stored)))
        for number in range(100):
            await refer(mallory, subjects.SWARM_ROLLOUTS, MALLORY, 4096, runs, f"{number:064x}", f"loris-{number}")
        for index in range(10):
            await share(mallory, key, "beta", index)
        await until(lambda: alpha.status.get("accepted") == 10, 120)
        await until(lambda: alpha.status.get("refused_reference") == 100)
        await mallory.close()


async def test_bytes_stored_once_are_read_once_however_often_they_are_referred_to(nats_server: MakeServer, tmp_path: Path) -> None:
    """60 references to the same 7.5 MiB: 450 MiB to fetch, assemble and hash if each were
    followed.
    """
    config = configured("alpha", nats_server().url, tmp_path, intake_groups_per_s=400.0)
    key = SigningKey(new_seed())
    async with verifier(config) as alpha:
        mallory = await connect(config.nats.node_url, name="mallory")
        stored = await store_chunks(mallory, subjects.SWARM_ROLLOUTS, MALLORY, [bytes(MAX_CHUNK_BYTES)] * 8)
        runs, before = ",".join(map(str, stored)), received_bytes(alpha.planes._planes["swarm"]())
        for number in range(60):
            size = 8 * MAX_CHUNK_BYTES
            await refer(mallory, subjects.SWARM_ROLLOUTS, MALLORY, size, runs, f"{number:064x}", f"again-{number}")
        for index in range(5):
            await share(mallory, key, "beta", index)
        await until(lambda: alpha.status.get("accepted") == 5, 120)
        await until(lambda: alpha.status.get("refused") == 60)
        assert alpha.status.get("refused_blob_missing") == 1 and alpha.status.get("refused_reference") > 0
        assert received_bytes(alpha.planes._planes["swarm"]()) - before < 2 * 8 * MAX_CHUNK_BYTES
        await mallory.close()


def received_bytes(transport: Any) -> int:
    """Return what a client has received, in bytes."""
    return int(transport.connection.client.stats["in_bytes"])


async def test_large_payloads_in_work_are_bounded_for_the_node_and_each_sender(nats_server: MakeServer, tmp_path: Path) -> None:
    """Eight senders with three true payloads of 7.5 MiB each, 180 MiB, or twice as many, of which
    64 MiB may be in work: peaks of what is, from the intake's own counts.
    """
    turns_per_s = 4.0 * sum(turns_of(int(7.5 * MIB)) for _ in range(LARGE))  # so that only bytes in work bound it
    config = configured("alpha", nats_server().url, tmp_path, intake_groups_per_s=turns_per_s)
    peaks: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        take = InFlightLimit.take

        def noted(self: InFlightLimit, sender: str, size_bytes: int) -> None:
            take(self, sender, size_bytes)
            peaks.append((self.total_bytes, max(self._bytes.values(), default=0)))

        patch.setattr(InFlightLimit, "take", noted)
        async with verifier(config) as alpha:
            others = await connect(config.nats.node_url, name="others")
            for number in range(LARGE):
                payload = bytes([number]) * int(7.5 * MIB)
                subject = subjects.rollouts(f"mallory-{number % 8}")
                await others.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=f"{number}", timeout_s=20.0)
            await until(lambda: alpha.status.get("refused") == LARGE, 120)
            assert alpha.status.get("refused_malformed") == LARGE
            await others.close()
    assert max(total for total, _ in peaks) <= NODE_BYTES
    assert max(most for _, most in peaks) <= SENDER_BYTES

"""What `shared.transport.base` promises of payloads larger than a message, which travel in chunks,
over both transports.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.transport.base import TransportError
from shared.transport.nats.pull import fetch
from tests.integration.transport_planes import Plane, until
from tests.nats_server import delete_message


@pytest.mark.parametrize("size_bytes", [1_048_577, 25_000_000])
async def test_a_large_payload_travels_in_chunks_and_its_size_is_known_before(over, size_bytes):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport)
        payload = random.Random(size_bytes).randbytes(size_bytes)
        await transport.publish(f"{plane.tag}.queue", payload, stream=spec.name, message_id="1", timeout_s=20)
        [message] = await transport.read(spec.name, 1, 10)
        assert message.inline is None and message.size_bytes == size_bytes
        assert await transport.payload(message) == payload
        [delivery] = await fetch(transport, spec.name, "worker", 1, 2.0)
        assert await transport.payload(delivery.message) == payload
        await delivery.ack()

        async def swept() -> bool:
            return (await transport.stream_state(f"{spec.name}_BLOBS")).messages == 0

        await until(swept)

    await over(body)


async def test_a_blob_published_twice_is_stored_once(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        payload = bytes(2_500_000)
        chunks = 0
        for duplicate in (False, True):
            ack = await transport.publish(f"{plane.tag}.log.a", payload, stream=spec.name, message_id="1")
            assert (ack.seq, ack.duplicate) == (1, duplicate)
            chunks = chunks or (await transport.stream_state(f"{spec.name}_BLOBS")).messages

        async def swept() -> bool:
            return (await transport.stream_state(f"{spec.name}_BLOBS")).messages == chunks

        await until(swept)
        [message] = await transport.read(spec.name, 1, 1)
        assert await transport.payload(message) == payload

    await over(body)


async def test_blobs_of_several_publishers_at_once_do_not_mix(over):
    async def body(plane: Plane) -> None:
        transports = [await plane.open() for _ in range(3)]
        spec = await plane.log(transports[0])
        payloads = [random.Random(n).randbytes(3_000_000 + n) for n in range(3)]
        await asyncio.gather(
            *(
                t.publish(f"{plane.tag}.log.a", p, stream=spec.name, message_id=f"{n}", timeout_s=20)
                for n, (t, p) in enumerate(zip(transports, payloads, strict=True))
            )
        )
        messages = await transports[0].read(spec.name, 1, 10)
        found = {await transports[1].payload(message) for message in messages}
        assert found == set(payloads)

    await over(body)


async def test_a_blob_with_a_missing_chunk_is_an_error(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        await transport.publish(f"{plane.tag}.log.a", bytes(3_000_000), stream=spec.name, message_id="1")
        [message] = await transport.read(spec.name, 1, 1)
        await delete_message(transport, f"{spec.name}_BLOBS", 2)
        with pytest.raises(TransportError, match="chunk 2 is gone"):
            await transport.payload(message)

    await over(body)


async def test_nobody_reads_a_blob_before_the_message_that_refers_to_it_is_stored(over):
    """Whoever could would publish what it says first, and its author would be taken for the
    copier.
    """

    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        payload = b"what nobody is to know before its time; " * 75_000
        early: list[bytes] = []
        put_chunk = transport.chunks.put_chunk

        async def watched(subject, chunk, **options):
            early.append(chunk)
            return int(await put_chunk(subject, chunk, **options))

        transport.chunks.put_chunk = watched
        await transport.publish(f"{plane.tag}.log.a", payload, stream=spec.name, message_id="1")
        assert sum(map(len, early)) == len(payload)
        assert not any(b"nobody" in chunk or b"before its" in chunk for chunk in early)
        [message] = await transport.read(spec.name, 1, 1)
        assert (message.size_bytes, await transport.payload(message)) == (len(payload), payload)

    await over(body)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda size, digest, runs, seal: f"{size} {digest[::-1]} {runs} {seal}", "expected"),
        (lambda size, digest, runs, seal: f"{int(size) + 1} {digest} {runs} {seal}", "expected"),
        (lambda size, digest, runs, seal: f"2000000 {digest} {runs} {seal}", "larger than its stated"),
        (lambda size, digest, runs, seal: f"10 {digest} {runs} {seal}", "more chunks than its size allows"),
        (lambda size, digest, runs, seal: f"{size} {digest} 1,1,1,1 {seal}", "named twice"),
        (lambda size, digest, runs, seal: f"{size} {digest} 0-3 {seal}", "out of range"),
        (lambda size, digest, runs, seal: f"{size} {digest} 4-1 {seal}", "out of range"),
        (lambda size, digest, runs, seal: f"{size} {digest} -4 {seal}", "malformed"),
        (lambda size, digest, runs, seal: f"{size} {digest} 1_0 {seal}", "malformed"),
        (lambda size, digest, runs, seal: f"{size} {digest} 9223372036854775807 {seal}", "malformed"),
        (lambda size, digest, runs, seal: f"{size} {digest} 1000000000001-1000000000004 {seal}", "is gone"),
        (lambda size, digest, runs, seal: f"{'9' * 5000} {digest} {runs} {seal}", "malformed"),
        (lambda size, digest, runs, seal: f"{size} {digest} 1-999999999999 {seal}", "malformed"),
        (lambda size, digest, runs, seal: f"{size} {digest} {seal}", "malformed"),
        (lambda size, digest, runs, seal: "nonsense", "malformed"),
        (lambda size, digest, runs, seal: f"{size} {digest} {runs}", "malformed"),
        (lambda size, digest, runs, seal: f"{size} {digest} {runs} {seal[::-1]}", "expected"),
        (lambda size, digest, runs, seal: f"{size} {digest} {runs} {seal}00", "malformed"),
    ],
)
async def test_a_blob_whose_reference_was_tampered_with_is_an_error(over, change, complaint):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        await transport.publish(f"{plane.tag}.log.a", bytes(3_000_000), stream=spec.name, message_id="1")
        [message] = await transport.read(spec.name, 1, 1)
        forged = {"Swarm-Blob": change(*message.headers["Swarm-Blob"].split(" "))}
        await transport.publish(f"{plane.tag}.log.a", b"", stream=spec.name, message_id="2", headers=forged)
        [message] = await transport.read(spec.name, 2, 1)
        with pytest.raises(TransportError, match=complaint):
            await transport.payload(message)

    await over(body)

"""What `shared.transport.base` promises, over both transports."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams, node_streams
from shared.transport.base import (
    Conflict,
    ConsumerSpec,
    ConsumerState,
    KvEntry,
    Lowering,
    NotConnected,
    Retention,
    StreamFull,
    StreamSpec,
    TooLarge,
    Transport,
    TransportError,
)
from shared.transport.connect import connect
from shared.transport.lowering import WouldLower

LOG = StreamSpec(name="LOG", subjects=("log.>",))
QUEUE = StreamSpec(name="QUEUE", subjects=("queue",), retention=Retention.WORK_QUEUE, discard_new=True, max_msgs=20)
WORKER = ConsumerSpec(name="worker", ack_wait_s=0.4, max_deliver=3, max_ack_pending=10)


class Plane:
    """Opens transports to one server and gives each test stream names of its own there."""

    def __init__(self, url: str, tag: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.tag = tag
        self._stack = stack

    async def open(self) -> Transport:
        transport = await connect(self.url, name=f"test-{self.tag}")
        self._stack.push_async_callback(transport.close)
        return transport

    def named(self, spec: StreamSpec) -> StreamSpec:
        return replace(spec, name=f"{spec.name}_{self.tag}", subjects=tuple(f"{self.tag}.{s}" for s in spec.subjects))

    async def log(self, transport: Transport, count: int = 0, **changes: object) -> StreamSpec:
        spec = self.named(replace(LOG, **changes))  # type: ignore[arg-type]
        await transport.ensure_stream(spec)
        for number in range(count):
            await transport.publish(f"{self.tag}.log.a", b"%d" % number, stream=spec.name, message_id=f"m{number}")
        return spec

    async def queue(self, transport: Transport, count: int = 0, **changes: object) -> StreamSpec:
        spec = self.named(replace(QUEUE, **changes))  # type: ignore[arg-type]
        await transport.ensure_stream(spec)
        await transport.ensure_consumer(spec.name, WORKER)
        for number in range(count):
            await transport.publish(f"{self.tag}.queue", b"%d" % number, stream=spec.name, message_id=f"m{number}")
        return spec


Body = Callable[[Plane], Awaitable[None]]


@pytest.fixture(params=["memory", "nats"])
def over(request: pytest.FixtureRequest) -> Callable[[Body], Awaitable[None]]:
    """Runs a test's body on a plane of its own."""
    tag = f"t{random.getrandbits(40):x}"
    url = f"memory://{tag}" if request.param == "memory" else request.getfixturevalue("nats_url")

    async def run(body: Body) -> None:
        async with AsyncExitStack() as stack:
            await body(Plane(url, tag, stack))

    return run


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 120) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def next_of(watch: AsyncIterator[KvEntry], timeout_s: float = 5.0) -> KvEntry:
    return await asyncio.wait_for(anext(watch), timeout_s)


async def test_a_message_id_is_stored_once(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        first = await transport.publish(f"{plane.tag}.log.a", b"x", stream=spec.name, message_id="same")
        again = await transport.publish(f"{plane.tag}.log.b", b"y", stream=spec.name, message_id="same")
        assert (first.seq, first.duplicate, again.seq, again.duplicate) == (1, False, 1, True)
        assert (await transport.stream_state(spec.name)).messages == 1

    await over(body)


async def test_a_message_comes_back_as_it_was_sent(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        payload = bytes(range(256))
        await transport.publish(f"{plane.tag}.log.a", payload, stream=spec.name, message_id="id-1", headers={"Swarm-Test": "a: b"})
        message = await transport.get(spec.name, 1)
        assert message is not None
        assert (message.stream, message.seq, message.subject) == (spec.name, 1, f"{plane.tag}.log.a")
        assert (message.inline, message.size_bytes) == (payload, 256)
        assert message.headers["Nats-Msg-Id"] == "id-1"
        assert message.headers["Swarm-Test"] == "a: b"
        assert message.stored_at == pytest.approx(time.time(), abs=5)
        assert await transport.payload(message) == payload

    await over(body)


async def test_an_expected_sequence_that_is_wrong_is_a_conflict(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        subject = f"{plane.tag}.log.a"
        await transport.publish(subject, b"1", stream=spec.name, message_id="1", expected_last_seq=0)
        with pytest.raises(Conflict):
            await transport.publish(subject, b"2", stream=spec.name, message_id="2", expected_last_seq=0)
        assert (await transport.publish(subject, b"2", stream=spec.name, message_id="2", expected_last_seq=1)).seq == 2

    await over(body)


async def test_publishing_again_with_the_same_expected_sequence_finds_our_own_message(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        subject = f"{plane.tag}.log.a"
        await transport.publish(subject, b"1", stream=spec.name, message_id="1", expected_last_seq=0)
        await transport.publish(subject, b"2", stream=spec.name, message_id="2")
        again = await transport.publish(subject, b"1", stream=spec.name, message_id="1", expected_last_seq=0)
        assert (again.seq, again.duplicate) == (1, True)

    await over(body)


async def test_of_concurrent_writers_that_expect_the_same_sequence_one_wins(over):
    async def body(plane: Plane) -> None:
        transports = [await plane.open() for _ in range(3)]
        spec = await plane.log(transports[0])
        outcomes = await asyncio.gather(
            *(
                t.publish(f"{plane.tag}.log.a", b"x", stream=spec.name, message_id=f"w{n}", expected_last_seq=0)
                for n, t in enumerate(transports)
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 2

    await over(body)


async def test_a_full_queue_refuses_and_takes_again_after_an_ack(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 3, max_msgs=3)
        subject = f"{plane.tag}.queue"
        with pytest.raises(StreamFull):
            await transport.publish(subject, b"3", stream=spec.name, message_id="m3")
        [delivery] = await transport.fetch(spec.name, "worker", 1, 2.0)
        await delivery.ack()
        assert not (await transport.publish(subject, b"3", stream=spec.name, message_id="m3")).duplicate

    await over(body)


async def test_a_queue_full_of_bytes_refuses_a_blob_too(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, max_bytes=3_000_000)
        subject = f"{plane.tag}.queue"
        await transport.publish(subject, bytes(2_000_000), stream=spec.name, message_id="1")
        with pytest.raises(StreamFull):
            await transport.publish(subject, bytes(2_000_000), stream=spec.name, message_id="2")
        assert (await transport.stream_state(spec.name)).messages == 1
        assert (await transport.stream_state(f"{spec.name}_BLOBS")).size_bytes < 2_500_000

    await over(body)


async def test_a_log_at_its_limit_forgets_its_oldest(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 5, max_msgs=3)
        state = await transport.stream_state(spec.name)
        assert (state.first_seq, state.last_seq, state.messages) == (3, 5, 3)

    await over(body)


async def test_a_subject_at_its_limit_forgets_its_own_oldest_and_no_other_s(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 1, max_msgs_per_subject=2)
        for number in range(4):
            await transport.publish(f"{plane.tag}.log.b", b"b%d" % number, stream=spec.name, message_id=f"b{number}")
        assert [message.inline for message in await transport.read(spec.name, 1, 10)] == [b"0", b"b2", b"b3"]
        # A bound that is new to a stream which is there takes what is beyond it, of each subject.
        await plane.log(transport, max_msgs_per_subject=1)
        assert [message.inline for message in await transport.read(spec.name, 1, 10)] == [b"0", b"b3"]

    await over(body)


async def test_a_payload_above_the_limit_of_its_stream_is_too_large(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, max_msg_bytes=100)
        subject = f"{plane.tag}.log.a"
        await transport.publish(subject, bytes(100), stream=spec.name, message_id="1")
        with pytest.raises(TooLarge):
            await transport.publish(subject, bytes(101), stream=spec.name, message_id="2")
        blobs = await plane.log(transport, max_msg_bytes=2_000_000)
        with pytest.raises(TooLarge):
            await transport.publish(subject, bytes(2_000_001), stream=blobs.name, message_id="3")
        assert (await transport.stream_state(blobs.name)).last_seq == 1

    await over(body)


async def test_publishing_where_there_is_no_stream_ends_at_its_deadline(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        started = asyncio.get_running_loop().time()
        with pytest.raises(NotConnected, match="NOWHERE"):
            await transport.publish("nowhere.at.all", b"x", stream="NOWHERE", message_id="1", timeout_s=0.5)
        assert asyncio.get_running_loop().time() - started < 10.0

    await over(body)


async def test_an_acknowledged_message_leaves_the_queue_and_a_second_ack_does_nothing(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 2)
        first, second = await transport.fetch(spec.name, "worker", 10, 2.0)
        assert (first.message.inline, first.deliveries, second.message.inline) == (b"0", 1, b"1")
        assert await transport.consumer_state(spec.name, "worker") == ConsumerState(0, 2, 0)
        await first.ack()
        await first.ack()
        await first.nak()
        assert (await transport.stream_state(spec.name)).messages == 1
        await second.ack()
        assert (await transport.stream_state(spec.name)).messages == 0
        assert await transport.fetch(spec.name, "worker", 1, 0.6) == []

    await over(body)


async def test_an_empty_queue_gives_nothing_within_the_timeout(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport)
        started = asyncio.get_running_loop().time()
        assert await transport.fetch(spec.name, "worker", 5, 0.3) == []
        assert 0.25 < asyncio.get_running_loop().time() - started < 10.0

    await over(body)


async def test_a_waiting_fetch_returns_as_soon_as_one_message_is_there(over):
    async def body(plane: Plane) -> None:
        reader, writer = await plane.open(), await plane.open()
        spec = await plane.queue(reader)
        waiting = asyncio.create_task(reader.fetch(spec.name, "worker", 8, 60.0))
        await asyncio.sleep(0.2)
        started = asyncio.get_running_loop().time()
        await writer.publish(f"{plane.tag}.queue", b"x", stream=spec.name, message_id="1")
        [delivery] = await waiting
        assert asyncio.get_running_loop().time() - started < 30.0
        await delivery.ack()

    await over(body)


async def test_two_readers_share_a_queue_without_overlap(over):
    async def body(plane: Plane) -> None:
        readers = [await plane.open(), await plane.open()]
        spec = await plane.queue(readers[0], 10)
        handed = await asyncio.gather(*(reader.fetch(spec.name, "worker", 5, 2.0) for reader in readers))
        positions = sorted(delivery.message.seq for deliveries in handed for delivery in deliveries)
        assert positions == sorted(set(positions))
        for deliveries in handed:
            for delivery in deliveries:
                await delivery.ack()

    await over(body)


async def test_a_message_given_back_is_handed_out_again_after_its_delay(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 1)
        [delivery] = await transport.fetch(spec.name, "worker", 1, 2.0)
        await delivery.nak(0.3)
        assert await transport.fetch(spec.name, "worker", 1, 0.1) == []
        [again] = await transport.fetch(spec.name, "worker", 1, 2.0)
        assert again.deliveries == 2
        await again.nak()
        [third] = await transport.fetch(spec.name, "worker", 1, 0.3)
        assert third.deliveries == 3
        await third.ack()

    await over(body)


async def test_an_unacknowledged_message_comes_again_until_max_deliver_and_then_stays(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 1)
        for expected in (1, 2, 3):
            [delivery] = await transport.fetch(spec.name, "worker", 1, 3.0)
            assert delivery.deliveries == expected
        assert await transport.fetch(spec.name, "worker", 1, 1.0) == []
        assert (await transport.stream_state(spec.name)).messages == 1
        await transport.delete(spec.name, delivery.message.seq)
        assert (await transport.stream_state(spec.name)).messages == 0

    await over(body)


async def test_work_in_progress_is_not_handed_out_again(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 1)
        [delivery] = await transport.fetch(spec.name, "worker", 1, 2.0)
        for _ in range(5):
            assert await transport.fetch(spec.name, "worker", 1, 0.2) == []
            await delivery.in_progress()
        await delivery.ack()
        assert (await transport.stream_state(spec.name)).messages == 0

    await over(body)


async def test_no_more_than_max_ack_pending_are_out_at_once(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 12)
        deliveries = await transport.fetch(spec.name, "worker", 12, 1.0)
        assert len(deliveries) == 10
        for delivery in deliveries:
            await delivery.ack()
        rest = await transport.fetch(spec.name, "worker", 12, 1.0)
        assert [delivery.message.inline for delivery in rest] == [b"10", b"11"]
        for delivery in rest:
            await delivery.ack()

    await over(body)


async def test_fetching_for_a_consumer_that_does_not_exist_says_so(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport)
        with pytest.raises(NotConnected, match="nobody"):
            await transport.fetch(spec.name, "nobody", 1, 0.4)

    await over(body)


async def test_reading_goes_over_gaps_and_ends_at_the_end(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 10)
        await transport.purge(spec.name, 2)
        await transport.delete(spec.name, 5)
        await transport.delete(spec.name, 6)
        assert [m.seq for m in await transport.read(spec.name, 0, 100)] == [3, 4, 7, 8, 9, 10]
        assert [m.seq for m in await transport.read(spec.name, 5, 2)] == [7, 8]
        assert await transport.read(spec.name, 11, 10) == []
        assert await transport.get(spec.name, 5) is None
        assert await transport.get(spec.name, 99) is None
        assert await transport.get(spec.name, 0) is None
        await transport.delete(spec.name, 5)
        await transport.purge(spec.name, 10)
        assert await transport.read(spec.name, 1, 10) == []
        state = await transport.stream_state(spec.name)
        assert (state.first_seq, state.last_seq, state.messages) == (11, 10, 0)

    await over(body)


async def test_reading_an_empty_stream_gives_nothing_and_a_missing_one_an_error(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        assert await transport.read(spec.name, 1, 10) == []
        assert await transport.last(spec.name, f"{plane.tag}.log.a") is None
        with pytest.raises(NotConnected):
            await transport.read("NOWHERE", 1, 10, timeout_s=0.4)

    await over(body)


async def test_the_last_message_of_a_subject(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 3)
        await transport.publish(f"{plane.tag}.log.b", b"other", stream=spec.name, message_id="b")
        newest = await transport.last(spec.name, f"{plane.tag}.log.a")
        assert newest is not None and newest.seq == 3

    await over(body)


async def test_messages_older_than_max_age_are_gone(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 2, max_age_s=0.5)

        async def empty() -> bool:
            return not await transport.read(spec.name, 1, 10)

        await until(empty)

    await over(body)


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
        [delivery] = await transport.fetch(spec.name, "worker", 1, 2.0)
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
        await transport.delete(f"{spec.name}_BLOBS", 2)
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
        put_chunk = transport._chunks.put_chunk

        async def watched(subject, chunk, **options):
            early.append(chunk)
            return int(await put_chunk(subject, chunk, **options))

        transport._chunks.put_chunk = watched
        await transport.publish(f"{plane.tag}.log.a", payload, stream=spec.name, message_id="1")
        assert sum(map(len, early)) == len(payload)
        assert not any(b"nobody" in chunk or b"time" in chunk for chunk in early)
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
        (lambda size, digest, runs, seal: f"{size} {digest} {runs}", "expected"),
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


async def test_key_values_are_put_compared_and_listed(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket, history=4)
        await transport.kv.ensure(bucket, history=8)
        assert bucket in await transport.kv.buckets()
        assert await transport.kv.get(bucket, "policy") is None
        first = await transport.kv.update(bucket, "policy", b"1", last_revision=0)
        with pytest.raises(Conflict):
            await transport.kv.update(bucket, "policy", b"x", last_revision=0)
        second = await transport.kv.update(bucket, "policy", b"2", last_revision=first)
        with pytest.raises(Conflict):
            await transport.kv.update(bucket, "policy", b"x", last_revision=first)
        third = await transport.kv.put(bucket, "policy", b"3")
        assert first < second < third
        assert await transport.kv.get(bucket, "policy") == KvEntry("policy", b"3", third)
        await transport.kv.put(bucket, "status.trainer.0", b"t")
        await transport.kv.put(bucket, "status.verifier.0", b"v")
        assert [entry.key for entry in await transport.kv.all(bucket)] == ["policy", "status.trainer.0", "status.verifier.0"]
        assert [entry.value for entry in await transport.kv.all(bucket, "status.")] == [b"t", b"v"]
        assert [entry.value for entry in await transport.kv.all(bucket, "status.tr")] == [b"t"]
        assert await transport.kv.all(bucket, "none.") == []
        with pytest.raises(TransportError, match="valid key"):
            await transport.kv.put(bucket, "policy.>", b"x")

    await over(body)


async def test_the_newest_keys_of_a_bucket_come_first_and_how_many_others_there_are_is_told(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket)
        assert await transport.kv.newest(bucket, 10) == ([], 0)
        for number in range(20):
            await transport.kv.put(bucket, f"n{number}", b"1")
        newest, others = await transport.kv.newest(bucket, 5)
        assert [entry.key for entry in newest] == ["n19", "n18", "n17", "n16", "n15"] and others == 15
        await transport.kv.put(bucket, "n3", b"2")
        whole, others = await transport.kv.newest(bucket, 20)
        assert whole[0].key == "n3" and whole[0].value == b"2" and len(whole) == 20 and others == 0
        with pytest.raises(TransportError):
            await transport.kv.newest(f"none_{plane.tag}", 5)

    await over(body)


async def test_a_bucket_takes_no_value_larger_than_it_says(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket, max_value_bytes=4096)
        await transport.kv.put(bucket, "node", bytes(4096))
        with pytest.raises(TooLarge):
            await transport.kv.put(bucket, "node", bytes(8192))
        with pytest.raises(TooLarge):
            await transport.kv.update(bucket, "other", bytes(8192), last_revision=0)
        assert [len(entry.value) for entry in await transport.kv.all(bucket)] == [4096]

    await over(body)


async def test_values_expire_after_the_time_to_live(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket, ttl_s=0.5)
        await transport.kv.put(bucket, "node", b"here")
        assert await transport.kv.all(bucket) != []

        async def gone() -> bool:
            return await transport.kv.get(bucket, "node") is None and not await transport.kv.all(bucket)

        await until(gone)

    await over(body)


async def test_more_keys_than_one_request_lists_are_listed(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket, history=2)
        await asyncio.gather(*(transport.kv.put(bucket, f"n.k{n}", b"%d" % n) for n in range(1100)))
        entries = await transport.kv.all(bucket, "n.")
        assert {entry.key: entry.value for entry in entries} == {f"n.k{n}": b"%d" % n for n in range(1100)}

    await over(body)


async def test_a_watch_gives_the_present_value_first_and_then_each_newest(over):
    async def body(plane: Plane) -> None:
        reader, writer = await plane.open(), await plane.open()
        bucket = f"bucket_{plane.tag}"
        await reader.kv.ensure(bucket, history=8)
        await writer.kv.put(bucket, "policy", b"1")
        watch = reader.kv.watch(bucket, "policy", poll_s=30.0)
        assert (await next_of(watch)).value == b"1"
        following = asyncio.create_task(next_of(watch))
        await asyncio.sleep(0.1)
        started = asyncio.get_running_loop().time()
        await writer.kv.put(bucket, "other", b"no")
        await writer.kv.put(bucket, "policy", b"2")
        assert (await following).value == b"2"
        assert asyncio.get_running_loop().time() - started < 10.0
        await writer.kv.put(bucket, "policy", b"3")
        await writer.kv.put(bucket, "policy", b"4")
        newest = await next_of(watch)
        while newest.value != b"4":
            newest = await next_of(watch)
        await watch.aclose()  # type: ignore[attr-defined]

    await over(body)


async def test_a_watch_waits_for_a_key_that_is_not_there_yet(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket)
        waiting = asyncio.create_task(next_of(transport.kv.watch(bucket, "late", poll_s=0.2)))
        await asyncio.sleep(0.3)
        await transport.kv.put(bucket, "late", b"here")
        assert (await waiting).value == b"here"

    await over(body)


async def test_settings_that_drifted_are_updated(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        await plane.queue(transport, 4, max_msgs=4)
        spec = await plane.queue(transport, max_msgs=6)
        for number in (4, 5):
            await transport.publish(f"{plane.tag}.queue", b"x", stream=spec.name, message_id=f"m{number}")
        await transport.ensure_consumer(spec.name, replace(WORKER, max_ack_pending=2))
        assert len(await transport.fetch(spec.name, "worker", 10, 1.0)) == 2

    await over(body)


@pytest.mark.parametrize(
    ("existing", "wanted", "told"),
    [
        ({"max_msgs": 6}, {"max_msgs": 4}, "max_msgs from 6 to 4"),
        ({"max_bytes": 4096}, {"max_bytes": 2048}, "max_bytes from 4096 to 2048"),
        ({}, {"max_age_s": 60.0}, r"max_age_s from no limit to 60"),
        ({"max_age_s": 60.0}, {"max_age_s": 30.0}, r"max_age_s from 60\.0 to 30\.0"),
    ],
)
async def test_copies_room_and_time_are_lowered_only_where_that_is_meant(over, existing, wanted, told):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 5, **existing)
        lower = replace(spec, **{name: value for name, value in wanted.items()})
        with pytest.raises(WouldLower, match=told):
            await transport.ensure_stream(lower, Lowering.REFUSE)
        with pytest.raises(WouldLower, match=told):
            await transport.ensure_stream(lower, Lowering.LOOK)
        await transport.ensure_stream(replace(lower, name=f"{lower.name}_none", subjects=("none",)), Lowering.LOOK)
        with pytest.raises(TransportError):
            await transport.stream_state(f"{lower.name}_none")
        await transport.ensure_stream(lower, Lowering.KEEP)
        await transport.ensure_stream(spec, Lowering.REFUSE)  # nothing was lowered, so nothing would be raised or lowered
        assert (await transport.stream_state(spec.name)).messages == 5
        await transport.ensure_stream(lower, Lowering.APPLY)
        with pytest.raises(WouldLower):
            await transport.ensure_stream(
                replace(lower, **{name: type(value)(value / 2) for name, value in wanted.items()}), Lowering.REFUSE
            )

    await over(body)


async def test_what_is_raised_or_is_no_protection_is_updated_beside_a_limit_that_is_kept(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, max_msgs=4)
        await transport.ensure_stream(replace(spec, max_msgs=2, max_bytes=-1, max_msg_bytes=3), Lowering.APPLY)
        await transport.ensure_stream(replace(spec, max_msgs=1, max_msg_bytes=100), Lowering.KEEP)
        for number in range(2):
            await transport.publish(f"{plane.tag}.queue", b"longer", stream=spec.name, message_id=f"m{number}")
        with pytest.raises(StreamFull):
            await transport.publish(f"{plane.tag}.queue", b"x", stream=spec.name, message_id="m2")

    await over(body)


async def test_a_service_with_a_shorter_time_leaves_a_bucket_s_time_alone(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"held_{plane.tag}"
        await transport.kv.ensure(bucket, ttl_s=60.0)
        await transport.kv.ensure(bucket, ttl_s=0.5, lowering=Lowering.KEEP)
        with pytest.raises(WouldLower, match="max_age"):
            await transport.kv.ensure(bucket, ttl_s=0.5, lowering=Lowering.REFUSE)
        await transport.kv.put(bucket, "key", b"value")
        await asyncio.sleep(1.0)
        assert await transport.kv.get(bucket, "key") is not None

    await over(body)


async def test_a_change_that_a_server_cannot_make_names_the_remedy(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        await plane.queue(transport)
        with pytest.raises(TransportError, match="nats stream rm"):
            await plane.queue(transport, retention=Retention.LIMITS)

    await over(body)


async def test_all_processes_of_two_nodes_can_set_up_their_streams_at_once(over):
    async def body(plane: Plane) -> None:
        transports = [await plane.open() for _ in range(8)]
        nodes = [f"{plane.tag}-{n % 2}" for n in range(8)]
        await asyncio.gather(*(ensure_node_streams(t, node) for t, node in zip(transports, nodes, strict=True)))
        await asyncio.gather(*(ensure_swarm_streams(t) for t in transports))
        await ensure_swarm_streams(transports[0])
        for spec in node_streams(nodes[0]):
            assert (await transports[0].stream_state(spec.name)).messages == 0
        assert (await transports[0].consumer_state(node_streams(nodes[0])[0].name, "verifier")).pending == 0

    await over(body)


async def test_setting_up_a_node_leaves_the_verifier_s_own_consumer_settings_alone(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        stream = node_streams(plane.tag)[0].name
        await ensure_node_streams(transport, plane.tag)
        await transport.ensure_consumer(stream, replace(WORKER, name="verifier", max_ack_pending=1))
        await ensure_node_streams(transport, plane.tag)
        for number in range(2):
            await transport.publish(f"node.{plane.tag}.rollouts", b"x", stream=stream, message_id=f"{number}")
        assert len(await transport.fetch(stream, "verifier", 2, 1.0)) == 1

    await over(body)


async def test_a_closed_transport_refuses_and_can_be_closed_twice(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 1)
        assert transport.connected
        await transport.close()
        await transport.close()
        assert not transport.connected
        with pytest.raises(NotConnected):
            await transport.publish(f"{plane.tag}.log.a", b"x", stream=spec.name, message_id="late", timeout_s=1.0)

    await over(body)


async def test_messages_are_counted_by_subject_and_the_server_tells_its_time(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 3)
        await transport.publish(f"{plane.tag}.log.b.c", b"x", stream=spec.name, message_id="other")
        assert await transport.counts(spec.name, f"{plane.tag}.log.>") == {f"{plane.tag}.log.a": 3, f"{plane.tag}.log.b.c": 1}
        assert await transport.counts(spec.name, f"{plane.tag}.log.*") == {f"{plane.tag}.log.a": 3}
        assert await transport.counts(spec.name, f"{plane.tag}.nothing") == {}
        before = time.time()
        at = (await transport.stream_state(spec.name)).at
        assert at is not None and before - 5 < at < time.time() + 5

    await over(body)

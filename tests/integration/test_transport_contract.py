"""What `shared.transport.base` promises of publishing to streams and reading them, over both
transports.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from shared.transport.base import Conflict, Ends, NoStream, NotConnected, StreamFull, TooLarge, TransportError
from shared.transport.nats.pull import fetch
from tests.integration.transport_planes import Plane, until
from tests.nats_server import delete_message


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


async def test_a_subject_that_takes_one_message_keeps_it(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, discard_new=True, write_once=True, max_msg_bytes=1024)
        for subject in (f"{plane.tag}.log.a", f"{plane.tag}.log.b"):
            await transport.publish(subject, b"1", stream=spec.name, message_id=subject)
            with pytest.raises(Conflict):
                await transport.publish(subject, b"2", stream=spec.name, message_id=f"{subject}, again")
        for removal in (delete_message(transport, spec.name, 1), transport.purge(spec.name, 2)):
            with pytest.raises(TransportError):
                await removal
        assert [each.inline for each in await transport.read(spec.name, 1, 10)] == [b"1", b"1"]

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
        [delivery] = await fetch(transport, spec.name, "worker", 1, 2.0)
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


async def test_reading_goes_over_gaps_and_ends_at_the_end(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 10)
        await transport.purge(spec.name, 2)
        await delete_message(transport, spec.name, 5)
        await delete_message(transport, spec.name, 6)
        assert [m.seq for m in await transport.read(spec.name, 0, 100)] == [3, 4, 7, 8, 9, 10]
        assert [m.seq for m in await transport.read(spec.name, 5, 2)] == [7, 8]
        assert await transport.read(spec.name, 11, 10) == []
        assert await transport.get(spec.name, 5) is None
        assert await transport.get(spec.name, 99) is None
        assert await transport.get(spec.name, 0) is None
        await delete_message(transport, spec.name, 5)
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


async def test_where_a_stream_begins_and_ends_is_told_by_its_messages(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport)
        assert await transport.ends(spec.name) == Ends()
        spec = await plane.log(transport, 3)
        await transport.publish(f"{plane.tag}.log.b.c", b"last", stream=spec.name, message_id="other")
        await transport.purge(spec.name, 1)
        for start_seq in (0, 1, 2):
            ends = await transport.ends(spec.name, start_seq)
            assert ends.first is not None and ends.last is not None
            assert (ends.first_seq, ends.last_seq, ends.messages) == (2, 4, 3)
            assert (ends.first.inline, ends.last.inline) == (b"1", b"last")
        one = await transport.ends(spec.name, 4)
        assert (one.first, one.first_seq, one.messages) == (one.last, 4, 1)
        assert await transport.ends(spec.name, 5) == Ends()
        await transport.purge(spec.name, 4)
        assert await transport.ends(spec.name) == Ends()

    await over(body)


async def test_a_missing_stream_has_no_ends_and_nobody_reads_it(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        with pytest.raises(NoStream):
            await transport.ends("NOWHERE")
        with pytest.raises(NoStream):
            await transport.read("NOWHERE", 1, 1, timeout_s=0.4)

    await over(body)

"""What `shared.transport.base` promises of keys, their values and those who watch them, over both
transports.
"""

from __future__ import annotations

import asyncio

import pytest

from shared.transport.base import Conflict, KvEntry, Lowering, StreamFull, TooLarge, TransportError
from tests.integration.transport_planes import Plane, next_of, until


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
        everything = await transport.kv.newest(bucket, 1024)
        assert [entry.key for entry in everything[0]] == ["status.verifier.0", "status.trainer.0", "policy"] and everything[1] == 0
        assert [entry.value for entry in (await transport.kv.newest(bucket, 1024, "status."))[0]] == [b"v", b"t"]
        assert [entry.value for entry in (await transport.kv.newest(bucket, 1024, "status.tr"))[0]] == [b"t"]
        assert await transport.kv.newest(bucket, 1024, "none.") == ([], 0)
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
        assert [len(entry.value) for entry in (await transport.kv.newest(bucket, 1024))[0]] == [4096]

    await over(body)


async def test_values_expire_after_the_time_to_live(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket, ttl_s=0.5)
        await transport.kv.put(bucket, "node", b"here")
        assert (await transport.kv.newest(bucket, 1024))[0] != []

        async def gone() -> bool:
            return await transport.kv.get(bucket, "node") is None and not (await transport.kv.newest(bucket, 1024))[0]

        await until(gone)

    await over(body)


async def test_of_too_many_keys_those_written_last_are_read_and_those_of_another_prefix_as_if_alone(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket, history=2)
        await transport.kv.put(bucket, "m.0", b"early")
        await asyncio.gather(*(transport.kv.put(bucket, f"n.k{n}", b"%d" % n) for n in range(1100)))
        await transport.kv.put(bucket, "n.k0", b"again")
        entries, others = await transport.kv.newest(bucket, 300, "n.")
        assert entries[0].value == b"again" and len({entry.key for entry in entries}) == 300
        assert others >= 800
        ((entry,), others) = await transport.kv.newest(bucket, 300, "m.")
        assert (entry.value, others) == (b"early", 0)

    await over(body)


async def test_a_full_bucket_takes_no_new_key_but_goes_on_with_those_whose_history_is_whole(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket, history=2, max_bytes=1_000_000, max_values=10)
        for number in (1, 2):
            await transport.kv.put(bucket, "here", b"%d" % number)
        for number in range(8):
            await transport.kv.put(bucket, f"flood.{number}", b"1")
        with pytest.raises(StreamFull, match=f"KV_{bucket}.*purge"):
            await transport.kv.put(bucket, "new", b"1")
        for _ in range(3):
            await transport.kv.put(bucket, "here", b"3")

    await over(body)


async def test_a_first_limit_on_a_bucket_deletes_nothing_so_a_service_sets_it_too(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"bucket_{plane.tag}"
        await transport.kv.ensure(bucket, history=2)
        for number in range(30):
            await transport.kv.put(bucket, f"n{number}", bytes(10_000))
        await transport.kv.ensure(
            bucket, history=2, max_value_bytes=5_000, max_bytes=100_000, max_values=10, lowering=Lowering.KEEP
        )
        assert len((await transport.kv.newest(bucket, 100))[0]) == 30
        with pytest.raises(StreamFull):
            await transport.kv.put(bucket, "n40", b"1")
        with pytest.raises(TooLarge):
            await transport.kv.put(bucket, "n0", bytes(10_000))

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

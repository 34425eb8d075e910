"""Watches of keys on a real server outlive a restart, lost pushes, what breaks the client's parser
and a bucket made anew; and no rollup wipes a bucket.
"""

from __future__ import annotations

import asyncio
import json

import nats

from tests.integration.nats_transports import MakeServer, asked, opened, sent_raw


async def test_a_watch_keeps_no_consumer_on_the_server_that_could_be_lost_and_outlives_a_restart(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport, opened(server.url) as writer:
        await transport.kv.ensure("state", history=4)
        await writer.kv.put("state", "policy", b"1")
        watch = transport.kv.watch("state", "policy", poll_s=1.0)
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"1"
        assert (await asked(server, "CONSUMER.LIST.KV_state"))["total"] == 0
        for round_number in (2, 3):
            await asyncio.to_thread(server.restart)
            await writer.kv.put("state", "policy", b"%d" % round_number)
            assert (await asyncio.wait_for(anext(watch), 120)).value == b"%d" % round_number


async def test_a_watch_whose_pushes_never_arrive_still_polls(nats_server: MakeServer):
    users = '{ user: watcher, password: w, permissions: { subscribe: { deny: ["$KV.>"] } } }, { user: writer, password: w }'
    server = nats_server(config=f"authorization {{ users: [ {users} ] }}")
    watcher, writer = (f"nats://{user}:w@127.0.0.1:{server.port}" for user in ("watcher", "writer"))
    async with opened(watcher) as reading, opened(writer) as writing:
        await writing.kv.ensure("state")
        await writing.kv.put("state", "policy", b"1")
        watch = reading.kv.watch("state", "policy", poll_s=0.3)
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"1"
        following = asyncio.create_task(anext(watch))
        await asyncio.sleep(0.1)
        await writing.kv.put("state", "policy", b"2")
        assert (await asyncio.wait_for(following, 3)).value == b"2"


async def test_a_message_that_breaks_the_client_s_parser_does_not_end_a_watch(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.kv.ensure("state")
        await transport.kv.put("state", "policy", b"1")
        watch = transport.kv.watch("state", "policy", poll_s=0.2)
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"1"
        following = asyncio.create_task(anext(watch))
        await asyncio.sleep(0.1)
        await sent_raw(server, "$KV.state.policy", b"NATS/1.0 204 \xff\r\n\r\n")
        assert (await asyncio.wait_for(following, 120)).value == b""
        await transport.kv.put("state", "policy", b"2")
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"2"
        assert transport.counters.errors["malformed"] == sum(transport.counters.errors.values()) == 1


async def test_a_watch_follows_a_bucket_that_was_made_anew(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.kv.ensure("state")
        for value in (b"1", b"2", b"3"):
            await transport.kv.put("state", "policy", value)
        watch = transport.kv.watch("state", "policy", poll_s=0.2)
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"3"
        await asked(server, "STREAM.DELETE.KV_state")
        await transport.kv.ensure("state")
        await transport.kv.put("state", "policy", b"new")
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"new"


async def test_a_bucket_cannot_be_wiped_with_a_rollup(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.kv.ensure("state")
        for key in ("a", "b"):
            await transport.kv.put("state", key, b"1")
        client = await nats.connect(server.url)
        answer = await client.request("$KV.state.a", b"2", headers={"Nats-Rollup": "all"}, timeout=5)
        await client.close()
        assert "rollup" in json.loads(answer.data)["error"]["description"]
        assert len((await transport.kv.newest("state", 1024))[0]) == 2

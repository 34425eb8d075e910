"""A swarm's server that answers rubbish, or a stranger on an open one who answers before it does: a
request fails as one that got no answer does, and a node goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import nats
import nats.aio.msg
import pytest

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import IntakeCursor
from shared.contracts.streams import ensure_swarm_streams, verifier_consumer
from shared.transport.base import Deadline, Lowering, StreamSpec, Transport, TransportError
from shared.transport.connect import connect
from shared.transport.nats import administration, pull
from shared.transport.nats.administration import restore_snapshot, take_snapshot
from shared.transport.nats.pull import fetch
from shared.transport.nats.transport import connection_of
from tests.integration.running_verifier import MakeServer, configured, generate, group, scored, until, verifier

NO_JETSTREAM_FOR_US = "accounts { A { users: [ { user: a, password: a } ] } }\nno_auth_user: a"
"""The server itself answers each request that it cannot serve it now."""
STREAM = StreamSpec(name="S", subjects=("s",), max_bytes=1)
ANSWERS = (
    b"", b"[", b"[]", b"7", b"{}", b"[" * 100_000, b'{"error": 5}', b'{"error": {"code": "x"}}', b'{"state": [], "config": []}',
    b'{"state": {"first_seq": "x", "last_seq": {}, "messages": -1, "bytes": 1}, "config": {"max_bytes": "x", "metadata": 3}}',
    b'{"state": {"subjects": [1]}, "total": "x", "streams": [7], "seq": -1, "num_pending": null}',
    b'{"total": 1e400, "streams": {"a": 1}, "seq": 99999999999999999999999, "state": {"subjects": {"a": "b"}}}',
    b'{"deliver_subject": 5, "config": 5, "state": 5, "consumers": {"a": 1}, "total": 1}',
    b'{"deliver_subject": "x\\r\\nPUB y 0", "streams": [{"config": []}], "total": 1}',
)  # fmt: skip
REQUESTS: dict[str, Callable[[Transport], Awaitable[object]]] = {
    "state": lambda hub: hub.stream_state("S"),
    "counts": lambda hub: hub.counts("S", ">"),
    "consumer": lambda hub: hub.consumer_state("S", "C"),
    "make a consumer": lambda hub: hub.ensure_consumer("S", verifier_consumer()),
    "look at a stream": lambda hub: hub.ensure_stream(STREAM, Lowering.LOOK),
    "publish": lambda hub: hub.publish("s", b"x", stream="S", message_id="1", timeout_s=2.0),
    "write a key": lambda hub: hub.kv.put("b", "k", b"x"),
    "buckets": lambda hub: hub.kv.buckets(),
    "newest keys": lambda hub: hub.kv.newest("b", 10),
    "read": lambda hub: hub.read("S", 5, 10, 2.0),
    "ends": lambda hub: hub.ends("S", 5, 2.0),
    "swarm's streams": ensure_swarm_streams,
    "fetch": lambda hub: fetch(hub, "S", "C", 1, 2.0),
    "take a snapshot": lambda hub: take_snapshot(connection_of(hub), "S", lambda part: None),
    "put a snapshot back": lambda hub: restore_snapshot(connection_of(hub), {"name": "S"}, {}, [], timeout_s=2.0),
    "the account": lambda hub: administration.account(connection_of(hub), Deadline(5.0)),
    "list streams": lambda hub: administration.streams(connection_of(hub), Deadline(5.0)),
    "list consumers": lambda hub: administration.consumers(connection_of(hub), ["S"], Deadline(5.0)),
}


DIRECT_GETS = "$JS.API.DIRECT.GET.>"


@asynccontextmanager
async def answering(url: str, *answers: bytes | dict[str, str], subject: str = ">") -> AsyncIterator[None]:
    """Somebody who answers every request on `subject` with `answers`: bodies, or the headers of
    messages.
    """
    stranger = await nats.connect(url)

    async def reply(asked: nats.aio.msg.Msg) -> None:
        for each in answers if asked.reply else ():
            body, headers = (each, None) if isinstance(each, bytes) else (b"x", each)
            await stranger.publish(asked.reply, body, headers=headers)

    await stranger.subscribe(subject, cb=reply)
    await stranger.flush()
    try:
        yield
    finally:
        await stranger.close()


@asynccontextmanager
async def heard(url: str) -> AsyncIterator[Counter[str]]:
    """Counts, by subject, the requests that are made meanwhile."""
    listener, asked = await nats.connect(url), Counter[str]()

    async def count(message: nats.aio.msg.Msg) -> None:
        asked[message.subject] += bool(message.reply)

    await listener.subscribe(">", cb=count)
    await listener.flush()
    try:
        yield asked
    finally:
        await listener.flush()
        await listener.drain()  # counts what has arrived, and closes


@pytest.mark.deadline(300)
async def test_an_answer_that_is_none_is_a_request_that_failed(nats_server: MakeServer) -> None:
    # Without JetStream the stranger's answer is the only one. Side by side, because some requests
    # are made again for seconds.
    urls = [nats_server(jetstream=None).url for _ in ANSWERS]
    taken = set().union(*await asyncio.gather(*map(requests_that_take, urls, ANSWERS)))
    # The others take an object without what they look for as one that says there is nothing.
    assert not taken & {"state", "consumer", "publish", "write a key", "newest keys", "read", "ends", "take a snapshot"}


async def requests_that_take(url: str, answer: bytes) -> set[str]:
    """Those of `REQUESTS` that succeed with this answer; an error other than a failed request is
    raised.
    """
    hub = await connect(url, name="test")

    async def takes(ask: Callable[[Transport], Awaitable[object]]) -> bool:
        with suppress(TransportError):
            async with asyncio.timeout(120):
                await ask(hub)
            return True
        return False

    async with answering(url, answer):
        taken = await asyncio.gather(*map(takes, REQUESTS.values()))
    await hub.close()
    return {name for name, taking in zip(REQUESTS, taken, strict=True) if taking}


@pytest.mark.parametrize(
    "headers",
    [
        {"Status": "204", "Nats-Last-Sequence": "x"},
        {"Nats-Subject": "s", "Nats-Sequence": "1", "Nats-Time-Stamp": "0001-01-01T00:00:00+23:59", "Nats-Last-Sequence": "x"},
    ],
)
async def test_headers_that_are_no_numbers_are_a_request_that_failed(nats_server: MakeServer, headers: dict[str, str]) -> None:
    url = nats_server(jetstream=None).url
    hub = await connect(url, name="test")
    async with answering(url, headers):
        with pytest.raises(TransportError, match="cannot be read"):
            await hub.read("S", 1, 10)
    await hub.close()


@pytest.mark.parametrize("said", ["$JS.ACK.x", "$JS.ACK.S.C.1.x.1.1.0", f"$JS.ACK.S.C.1.1.1.{10**400}.0"])
async def test_a_delivery_whose_numbers_are_none_is_a_request_that_failed(nats_server: MakeServer, said: str) -> None:
    # Built by hand: a real server lets no client send these, but one that lies sends them itself.
    hub = await connect(nats_server(jetstream=None).url, name="test")
    reply = SimpleNamespace(subject="s", reply=said, data=b"x", headers=None)
    with pytest.raises(TransportError, match="cannot be read"):
        pull._delivery(connection_of(hub), "S", reply, lambda message: None)
    await hub.close()


def message(seq: int) -> dict[str, str]:
    return {"Nats-Subject": "swarm.rollouts.v3.beta", "Nats-Sequence": str(seq), "Nats-Time-Stamp": "2026-11-26T12:00:00Z"}


def end(seq: int, pending: int = 0) -> dict[str, str]:
    return {"Status": "204", "Nats-Last-Sequence": str(seq), "Nats-Num-Pending": str(pending)}


IMPOSSIBLE = {
    "a sequence larger than 64 bits": (message(2**70), end(2**70)),
    "a sequence below the first": (message(-30_000_000), end(-30_000_000, 30_000_003)),
    "a message before the one that was asked for": (message(1), end(1, 30_000_003)),
    "more messages than 64 bits count": (message(9), end(9, 2**64)),
}
TO_A_NODE = ("a sequence larger than 64 bits", "a sequence below the first")
"""At which a verifier ended, and at which it took a gigabyte."""


@pytest.mark.parametrize("answers", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
async def test_a_place_that_no_stream_has_is_a_request_that_failed(
    nats_server: MakeServer, answers: tuple[dict[str, str], ...]
) -> None:
    url = nats_server(jetstream=None).url
    hub = await connect(url, name="test")
    async with answering(url, *answers, subject=DIRECT_GETS):
        with pytest.raises(TransportError, match="cannot be read|earlier message"):
            await hub.ends("S", 5, 10)
    await hub.close()


@pytest.mark.deadline(300)
@pytest.mark.parametrize(
    "answers",
    # The others are refused at the same place: the test above has all four there.
    [pytest.param(each, id=name, marks=[] if name in TO_A_NODE else pytest.mark.long) for name, each in IMPOSSIBLE.items()],
)
async def test_a_node_scores_on_whatever_places_its_swarm_tells(
    nats_server: MakeServer, tmp_path: Path, answers: tuple[dict[str, str], ...]
) -> None:
    """The verifier used to end at the first, again after each start; the second and third took a
    gigabyte.
    """
    hub, own = nats_server(jetstream=None).url, nats_server().url
    config = configured("alpha", own, tmp_path, swarm_url=hub, workers=1)
    async with answering(hub, *answers, subject=DIRECT_GETS), verifier(config) as alpha:
        await alpha.node.kv.put(subjects.node_bucket("alpha"), subjects.INTAKE_KEY, encode(IntakeCursor(position=1_000)))
        await generate(alpha.node, group("alpha", 0))
        await until(lambda: alpha.status.get("scored_local") == 1)
        await until(lambda: (alpha.registry.get_sample_value("swarm_sample_requests_total", {"result": "error"}) or 0) >= 2)
        await generate(alpha.node, group("alpha", 1))
        await until(lambda: alpha.status.get("scored_local") == 2)


async def test_a_server_that_cannot_serve_now_is_asked_a_few_times_a_second(nats_server: MakeServer) -> None:
    url = nats_server(config=NO_JETSTREAM_FOR_US).url
    hub = await connect(url, name="test")
    async with heard(url) as asked:
        with pytest.raises(TransportError, match="JetStream not enabled for account"):
            await hub.stream_state("S")  # within five seconds
    await hub.close()
    assert 1 <= asked["$JS.API.STREAM.INFO.S"] <= 15


REFUSALS_AT_ONCE: dict[str, tuple[bytes | dict[str, str], ...]] = {
    "busy": (b'{"error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}',),
    "nothing there": ({"Status": "404", "Description": "No Messages"},),
    "another leader": ({"Status": "409", "Description": "Leadership Change"},),
    "a bad request": ({"Status": "400", "Description": "Bad Request"},),
    "too many": ({"Status": "429", "Description": "Too Many Requests"},),
    "more, and none of it": (end(5, 3),),
    "more, from an earlier place": ({"Nats-Sequence": "x"}, end(1, 3)),
    "a message, and one that is missing": (message(7), end(8, 3)),
}


@pytest.mark.slow
@pytest.mark.deadline(300)
async def test_no_request_is_made_again_without_a_pause(nats_server: MakeServer) -> None:
    urls = [nats_server(jetstream=None).url for _ in REFUSALS_AT_ONCE]
    rates = await asyncio.gather(*map(asked_in_a_second, urls, REFUSALS_AT_ONCE.values()))
    assert max(rates) <= 12, dict(zip(REFUSALS_AT_ONCE, rates, strict=True))


async def asked_in_a_second(url: str, answers: tuple[bytes | dict[str, str], ...]) -> float:
    """Return how often each of the requests is made, on average, of who answers all of them so."""

    async def make(ask: Callable[[Transport], Awaitable[object]]) -> None:
        hub = await connect(url, name="test")
        with suppress(TransportError):
            await ask(hub)
        await hub.close()

    async with heard(url) as asked, answering(url, *answers):
        began = time.monotonic()
        await asyncio.gather(*map(make, REQUESTS.values()))
        seconds = time.monotonic() - began
    return asked.total() / len(REQUESTS) / seconds


async def test_a_list_that_brings_nothing_new_ends(nats_server: MakeServer) -> None:
    url = nats_server(jetstream=None).url
    hub = await connect(url, name="test")
    async with heard(url) as asked, answering(url, b'{"total": 9999999, "streams": [{"name": "S"}], "missing": ["T"]}'):
        listed = await administration.streams(connection_of(hub), Deadline(120.0))
    await hub.close()
    assert (listed.entries, listed.missing) == ([{"name": "S"}], ["T"])
    assert 2 <= asked["$JS.API.STREAM.LIST"] <= 100, "two, and some more where a busy machine answers too late"


NO_RESOURCES = b'{"error": {"code": 500, "err_code": 10023, "description": "insufficient resources"}}'


async def test_a_list_of_buckets_without_end_ends(nats_server: MakeServer) -> None:
    url = nats_server(jetstream=None).url
    hub = await connect(url, name="test")
    many = b'{"total": 9999999999, "streams": [%s]}' % b",".join(b'"KV_node_n%d"' % number for number in range(2000))
    async with answering(url, many), asyncio.timeout(120):
        assert len(await hub.kv.buckets()) == 16_384
    await hub.close()


@pytest.mark.deadline(300)
@pytest.mark.parametrize("answer", [b"{}", pytest.param(NO_RESOURCES, marks=pytest.mark.long)])
async def test_a_node_scores_on_whatever_its_swarm_answers(nats_server: MakeServer, tmp_path: Path, answer: bytes) -> None:
    hub, own = nats_server(jetstream=None).url, nats_server().url
    config = configured("alpha", own, tmp_path, swarm_url=hub, workers=1)
    async with answering(hub, answer), verifier(config) as alpha:
        await generate(alpha.node, group("alpha", 0))
        await until(lambda: alpha.status.get("scored_local") == 1)
        await asyncio.sleep(5.0)  # sharing, the directory, the scores and the intake have met the answers
        await generate(alpha.node, group("alpha", 1))
        await until(lambda: alpha.status.get("scored_local") == 2)
        assert len(await scored(alpha.node, "alpha")) == 2

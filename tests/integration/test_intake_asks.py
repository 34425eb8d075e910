"""What a verifier's intake asks the swarm's server: direct gets, which do not go through the queue
in which the server answers requests about streams for everybody.
"""

from __future__ import annotations

import time
from pathlib import Path

import nats
from prometheus_client import CollectorRegistry

from services.verifier.fair_queue import TokenBucket
from services.verifier.figures import Figures
from services.verifier.sharing import sign
from services.verifier.swarm_reader import MARGIN, SwarmReader
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.identity.keys import SigningKey, new_seed
from shared.runtime.status import StatusBoard
from shared.transport.base import StoredMessage, Transport
from shared.transport.connect import connect
from tests.integration.running_verifier import MakeServer, configured, group, until, verifier
from tests.nats_server import own_plane


async def test_taking_groups_in_asks_nothing_about_the_swarms_streams(nats_server: MakeServer, tmp_path: Path) -> None:
    node, swarm = nats_server(), nats_server()
    plane = await connect(swarm.url, name="operator")
    await ensure_swarm_streams(plane)
    config = configured("alpha", node.url, tmp_path, swarm.url)
    key, beta = SigningKey(new_seed()), await nats.connect(swarm.url)
    async with verifier(config) as alpha:
        await until(lambda: alpha.status.get("swarm_connected") == 1)
        asked: list[str] = []

        async def heard(message: object) -> None:
            asked.append(message.subject)  # type: ignore[attr-defined]

        tap = await nats.connect(swarm.url)
        await tap.subscribe("$JS.API.>", cb=heard)
        await tap.flush()
        for index in range(3):
            await beta.publish(subjects.rollouts("beta"), encode(sign(group("beta", index), key)))
            await until(lambda index=index: alpha.status.get("accepted") == index + 1)
        gets = len(asked)
        await until(lambda: len(asked) > gets + 10)
        assert {subject for subject in asked if not subject.startswith("$JS.API.DIRECT.GET.")} == set()
        await tap.close()
    await beta.close()
    await plane.close()


def a_reader(node: Transport, tmp_path: Path, replica: str = "0") -> SwarmReader:
    config = configured("alpha", "nats://127.0.0.1:1", tmp_path, intake_groups_per_s=1000.0)
    config = config.model_copy(update={"node": config.node.model_copy(update={"replica": replica})})
    reader = SwarmReader(config, node, Figures(CollectorRegistry(), StatusBoard("alpha", "verifier", "0")))
    reader._looks = TokenBucket(1e6, 1e6, time.monotonic())
    return reader


async def read_all(reader: SwarmReader, swarm: Transport, groups: int = 10_000, pending: int = 0) -> list[StoredMessage]:
    """Return what the reader is given until it says that there is no more for now."""
    found, more = await reader.read(swarm, groups, pending)
    while more:
        messages, more = await reader.read(swarm, groups, pending + len(found))
        found += messages
    return found


async def share(swarm: Transport, first: int, last: int) -> None:
    for number in range(first, last + 1):
        subject = subjects.rollouts("beta")
        await swarm.publish(subject, b"%d" % number, stream=subjects.SWARM_ROLLOUTS, message_id=f"m{number}")


async def planes() -> tuple[Transport, Transport]:
    node, swarm = await own_plane(), await own_plane()
    await ensure_node_streams(node, "alpha")
    await ensure_swarm_streams(swarm)
    return node, swarm


async def test_every_message_is_read_by_one_of_two_replicas(tmp_path: Path) -> None:
    node, swarm = await planes()
    replicas, found, total = [a_reader(node, tmp_path, replica) for replica in ("0", "1")], list[int](), 0
    assert await replicas[0].read(swarm, 10_000, 0) == ([], False)
    for many in (1, 2, 3, 200, 1):
        await share(swarm, total + 1, total + many)
        total += many
        while len(found) < total:
            for replica in replicas:
                messages, _ = await replica.read(swarm, 10_000, 0)
                found += [message.seq for message in messages]
    assert sorted(found) == list(range(1, total + 1))
    assert [await replica.read(swarm, 10_000, 0) for replica in replicas] == [([], False)] * 2


async def test_replicas_divide_what_is_wanted(tmp_path: Path) -> None:
    node, swarm = await planes()
    await share(swarm, 1, 200)
    one, other = a_reader(node, tmp_path, "0"), a_reader(node, tmp_path, "1")
    assert len(await read_all(one, swarm, 12)) == 12 * MARGIN
    assert len(await read_all(other, swarm, 12)) == 12 * MARGIN / 2
    assert len(await read_all(one, swarm, 12)) == 12 * MARGIN / 2


async def test_what_is_pending_and_what_is_the_nodes_own_is_not_read_again(tmp_path: Path) -> None:
    node, swarm = await planes()
    await share(swarm, 1, 20)
    reader = a_reader(node, tmp_path)
    assert await read_all(reader, swarm, 6, pending=9) == []
    for seq in range(1, 16):
        reader.sent(seq)
    assert [message.seq for message in await read_all(reader, swarm)] == [16, 17, 18, 19, 20]


async def test_a_replica_that_another_was_faster_than_takes_nothing(tmp_path: Path) -> None:
    node, swarm = await planes()
    await share(swarm, 1, 3)
    slow, fast = a_reader(node, tmp_path, "0"), a_reader(node, tmp_path, "1")
    news, taken = slow._news, []

    async def overtaken(*asked: object) -> object:
        answer = await news(*asked)  # type: ignore[arg-type]
        taken.extend(await read_all(fast, swarm))
        return answer

    slow._news = overtaken  # type: ignore[method-assign, assignment]
    assert await slow.read(swarm, 10_000, 0) == ([], True)
    assert [message.seq for message in taken] == [1, 2, 3]


async def test_a_stream_that_was_created_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    node, swarm = await planes()
    await share(swarm, 1, 9)
    reader = a_reader(node, tmp_path)
    assert len(await read_all(reader, swarm)) == 9
    assert await reader.read(swarm, 10_000, 0) == ([], False)
    _, another = await planes()
    await share(another, 1, 2)
    reader._looked_at_s -= 3600.0
    messages = await read_all(reader, another)
    assert [message.inline for message in messages] == [b"1", b"2"]


async def test_a_sender_in_good_standing_is_found_behind_a_flood(tmp_path: Path) -> None:
    node, swarm = await planes()
    reader = a_reader(node, tmp_path)
    subject = subjects.rollouts("gamma")
    await swarm.publish(subject, b"known", stream=subjects.SWARM_ROLLOUTS, message_id="known")
    (known,) = await read_all(reader, swarm)
    reader.accepted(known)
    for number in range(10):
        await share(swarm, 100 * number, 100 * number + 20)
        await swarm.publish(subject, b"new", stream=subjects.SWARM_ROLLOUTS, message_id=f"new{number}")
        messages = await read_all(reader, swarm, 2)
        assert len(messages) == 2 * MARGIN and subject in {message.subject for message in messages}

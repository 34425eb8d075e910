"""Messages redelivered, reordered, duplicated and delayed, and wrong clocks, against a running
verifier and sampler.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from services.generator.ledger import DrawLedger
from services.verifier.sharing import sign
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode
from shared.contracts.messages import Batch, ScoredGroup
from shared.contracts.streams import ensure_node_streams
from shared.identity.keys import SigningKey, new_seed
from shared.transport.base import ConsumerSpec
from shared.transport.connect import connect
from shared.transport.nats.pull import Delivery, fetch
from tests.chaos.figures import Row, note
from tests.chaos.scale import SCALE
from tests.integration.running_verifier import MakeServer, configured, group, queue_is_empty, scored, until, verifier
from tests.integration.sampler_node import a_node
from tests.unit.sampler_groups import scored_group

MINUTES_10_S = 600.0


async def test_local_groups_sent_twice_in_disorder_and_delivered_again_count_once(nats_server: MakeServer, tmp_path: Path) -> None:
    config, rng = configured("alpha", nats_server().url, tmp_path), random.Random(1)
    thief = await connect(config.nats.node_url, name="thief")
    await ensure_node_streams(thief, "alpha")
    stream, subject = subjects.node_rollouts_stream("alpha"), subjects.node_rollouts("alpha")
    spec = ConsumerSpec(name=subjects.VERIFIER_CONSUMER, ack_wait_s=5.0, max_deliver=5, max_ack_pending=256)
    await thief.ensure_consumer(stream, spec)
    payloads = [encode(group("alpha", index)) for index in range(SCALE.disordered_groups)]
    sent = [(number, payload) for number, payload in enumerate(payloads) for _ in range(2)]
    rng.shuffle(sent)
    duplicates = 0
    for number, payload in sent:
        ack = await thief.publish(subject, payload, stream=stream, message_id=f"draw-{number}")
        duplicates += ack.duplicate
    # A verifier that died with half of them in its hands, stored some of their rewards, and
    # acknowledged none.
    stolen: list[Delivery] = []
    while len(stolen) < len(payloads) // 2:
        stolen += await fetch(thief, stream, subjects.VERIFIER_CONSUMER, len(payloads) // 2 - len(stolen), 2.0)
    for delivery in stolen[::2]:
        payload = await thief.payload(delivery.message)
        done = ScoredGroup(
            group_id=content_id(payload),
            origin="local",
            group=decode(payload, type(group("alpha", 0))),
            rewards=[1.0, 0.0],
            scored_by="alpha",
            score_seconds=0.0,
            scored_at=time.time(),
        )
        where = subjects.node_scored_stream("alpha")
        await thief.publish(subjects.node_scored("alpha"), encode(done), stream=where, message_id=done.group_id)
    async with verifier(config) as alpha:
        await until(lambda: queue_is_empty(alpha.node, "alpha"), 120)
        counts = Counter(each.group_id for each in await scored(alpha.node, "alpha"))
    await thief.close()
    lost = sum(counts[content_id(payload)] == 0 for payload in payloads)
    twice = sum(count - 1 for count in counts.values())
    note(
        Row(
            fault="local groups redelivered, reordered, duplicated",
            injected=len(stolen) + len(sent) - len(payloads),
            counted="groups",
            sent=len(payloads),
            lost=lost,
            duplicated=twice,
            remark=f"{duplicates} second sends and {len(stolen)} second deliveries",
        )
    )
    assert duplicates == len(payloads)
    assert (lost, twice) == (0, 0)


async def test_groups_delayed_past_the_staleness_bound_are_dropped_counted_and_never_trained_on(nats_url: str) -> None:
    rng = random.Random(2)
    async with a_node(nats_url, external=0, max_staleness=1) as node:
        node.start()
        draws = 0
        for number in range(1, 6):
            delayed = [scored_group(100 + 10 * number + k, node=node.id, version=max(0, number - 4)) for k in range(3)]
            fresh = [scored_group(draws + k, node=node.id, version=number - 1) for k in range(2)]
            draws += 2
            arriving = [*fresh, *(delayed if number >= 4 else [])] * 2  # everything comes twice
            rng.shuffle(arriving)
            for each in arriving:
                # Another message id than the server knows: its own window of duplicates must not be
                # what helps.
                await node.transport.publish(
                    subjects.node_scored(node.id),
                    encode(each),
                    stream=subjects.node_scored_stream(node.id),
                    message_id=f"{rng.random()}",
                )
            await node.batches(number)
            await node.train_to(number)
        batches: list[Batch] = await node.batches(5)

        async def all_dropped() -> None:
            deadline = time.monotonic() + 10
            while (position := await node.reported()) is None or position.dropped_local < 6:
                assert time.monotonic() < deadline, position
                await asyncio.sleep(0.02)

        await all_dropped()
    used = Counter(item.scored.group_id for batch in batches for item in batch.items)
    stalest = max(item.staleness or 0 for batch in batches for item in batch.items)
    note(
        Row(
            fault="scored groups delayed past the staleness bound, reordered, sent twice under new ids",
            injected=6 + 2 * draws,
            counted="groups",
            sent=draws + 6,
            lost=0,
            duplicated=sum(count - 1 for count in used.values()),
            refused={"stale": 6},
            remark=f"stalest group trained on: {stalest} of at most 1",
        )
    )
    assert max(used.values()) == 1
    assert stalest <= 1


async def test_clocks_ten_minutes_off_are_refused_or_harmless_and_counted(nats_server: MakeServer, tmp_path: Path) -> None:
    config = configured("alpha", nats_server().url, tmp_path)
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        now, count = time.time(), 5
        for offset_s, name in ((MINUTES_10_S, "ahead"), (-MINUTES_10_S, "behind"), (0.0, "right")):
            key = SigningKey(new_seed())
            for number in range(count):
                body = msgspec.structs.replace(group(name, number), created_at=now + offset_s)
                payload = encode(sign(body, key))
                where = subjects.rollouts(name)
                await alpha.swarm.publish(where, payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload))
        await until(lambda: alpha.status.get("refused") + alpha.status.get("accepted") == 3 * count)
        assert alpha.status.get("refused_from_future") == count
        assert alpha.status.get("accepted") == 2 * count
    note(
        Row(
            fault="others' clocks 10 minutes off",
            injected=2 * count,
            counted="groups",
            sent=3 * count,
            refused={"from_future": count},
            remark="10 minutes behind is within the half hour that a group may be old and is taken in",
        )
    )


async def test_a_generator_replica_ten_minutes_ahead_takes_over_draws_and_no_draw_counts_twice(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock says that every lease ran out. Work is done twice; the draw's number as message id
    keeps it from counting twice.
    """
    node = "clocks"
    transport = await connect(nats_url, name=node)
    await ensure_node_streams(transport, node)
    right, ahead = (DrawLedger(transport, node, replica, 120.0) for replica in ("right", "ahead"))
    bounds = {"groups_per_step": 4, "max_staleness": 1, "consumed_local": 0, "dropped_local": 0}
    claimed = await right.claim(4, **bounds)
    true_time = time.time
    monkeypatch.setattr("services.generator.ledger.time.time", lambda: true_time() + MINUTES_10_S)
    stolen = await ahead.claim(4, **bounds)
    monkeypatch.undo()
    assert claimed is not None
    assert stolen is not None
    assert (stolen.first, stolen.count) == (claimed.first, claimed.count)
    subject, stream = subjects.node_rollouts(node), subjects.node_rollouts_stream(node)
    draws = range(claimed.first, claimed.first + claimed.count)
    acks = [
        await transport.publish(subject, text + b" %d" % draw, stream=stream, message_id=f"draw-{draw}")
        for text in (b"by the right one", b"by the one ahead")
        for draw in draws
    ]
    assert [ack.duplicate for ack in acks] == [False] * 4 + [True] * 4
    assert (await transport.stream_state(subjects.node_rollouts_stream(node))).messages == 4
    await transport.close()
    note(
        Row(
            fault="own generator replica's clock 10 minutes ahead",
            injected=1,
            counted="draws",
            sent=4,
            lost=0,
            duplicated=0,
            remark="the draws are made twice and stored once",
        )
    )

"""Generator replicas share one ledger of task draws on a real server."""

from __future__ import annotations

import asyncio
import uuid

from services.generator.ledger import DrawLedger
from shared.contracts.control import DrawLease
from shared.contracts.streams import ensure_node_streams
from shared.transport.connect import connect

PER_STEP = 10
RULES = {"groups_per_step": PER_STEP, "max_staleness": 1, "dropped_local": 0}


def _draws(lease: DrawLease) -> list[int]:
    return list(range(lease.first, lease.first + lease.count))


async def test_replicas_that_claim_at_once_make_every_draw_exactly_once(nats_url: str) -> None:
    node = f"ledger-{uuid.uuid4().hex[:8]}"
    transports = [await connect(nats_url, name=f"replica-{number}") for number in range(3)]
    await ensure_node_streams(transports[0], node)

    async def replica(number: int) -> list[int]:
        ledger = DrawLedger(transports[number], node, f"r{number}", lease_s=60.0)
        made: list[int] = []
        # 20 draws may be out at version 0, and 10 more for each version that has been trained
        # since.
        for consumed in (0, 10, 20, 30):
            while (lease := await ledger.claim(3, consumed_local=consumed, **RULES)) is not None:
                await asyncio.sleep(0.03)  # generation takes a while; meanwhile the others claim
                made += _draws(lease)
                await ledger.finish(lease.first)
        return made

    made = await asyncio.gather(*(replica(number) for number in range(3)))
    together = sorted(draw for draws in made for draw in draws)
    assert together == list(range(2 * PER_STEP + 30))
    assert sum(bool(draws) for draws in made) > 1, "the work was not shared"
    for transport in transports:
        await transport.close()


async def test_a_replica_that_died_leaves_nothing_undone(nats_url: str) -> None:
    node = f"ledger-{uuid.uuid4().hex[:8]}"
    transport = await connect(nats_url, name="replica")
    await ensure_node_streams(transport, node)
    dead = await DrawLedger(transport, node, "dead", lease_s=0.2).claim(4, consumed_local=0, **RULES)
    alive = DrawLedger(transport, node, "alive", lease_s=60.0)
    first = await alive.claim(4, consumed_local=0, **RULES)
    await asyncio.sleep(0.3)
    again = await alive.claim(4, consumed_local=0, **RULES)
    assert dead is not None and first is not None and again is not None
    assert _draws(again) == _draws(dead) == [0, 1, 2, 3]
    assert _draws(first) == [4, 5, 6, 7]
    await transport.close()


async def test_a_restarted_replica_takes_up_its_own_draws_at_once(nats_url: str) -> None:
    node = f"ledger-{uuid.uuid4().hex[:8]}"
    transport = await connect(nats_url, name="replica")
    await ensure_node_streams(transport, node)
    before = await DrawLedger(transport, node, "0", lease_s=600.0).claim(4, consumed_local=0, **RULES)
    restarted = DrawLedger(transport, node, "0", lease_s=600.0)
    await restarted.release_own()
    after = await restarted.claim(8, consumed_local=0, **RULES)
    assert before is not None and after is not None
    assert _draws(after) == _draws(before)
    await transport.close()


async def test_replicas_and_restarts_share_one_secret_that_other_nodes_do_not_have(nats_url: str) -> None:
    nodes = [f"ledger-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    transport = await connect(nats_url, name="replica")
    for node in nodes:
        await ensure_node_streams(transport, node)
    ledgers = [DrawLedger(transport, nodes[0], f"r{number}", lease_s=60.0) for number in range(4)]
    secrets = await asyncio.gather(*(ledger.secret() for ledger in ledgers))
    assert await ledgers[0].claim(3, consumed_local=0, **RULES) is not None
    await ledgers[0].release_own()
    again = await DrawLedger(transport, nodes[0], "late", lease_s=60.0).secret()
    assert {*secrets, again} == {again}
    assert len(again) == 16
    assert await DrawLedger(transport, nodes[1], "r0", lease_s=60.0).secret() != again
    await transport.close()

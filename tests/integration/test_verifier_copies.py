"""Copies at running verifiers, on a real server: several replicas of one node, and what copies cost
the node's local groups.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from services.verifier.sharing import sign
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.contracts.messages import Completion, RolloutGroup
from shared.contracts.streams import ensure_swarm_streams
from shared.identity.keys import SigningKey, new_seed
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.integration.running_verifier import configured, generate, group, scored, until, verifier
from tests.nats_server import NatsServer

MakeServer = Callable[..., NatsServer]
WORDS = [
    f"{start}{end}"
    for start in ("divi", "remain", "numb", "facto", "answ", "chec")
    for end in ("de", "der", "ers", "ring", "es", "ked")
]
ORIGINALS = 24
ATTACK_S = 8.0
HONEST, COPIER = SigningKey(new_seed()), SigningKey(new_seed())


def with_texts(made: RolloutGroup, texts: list[str]) -> RolloutGroup:
    completions = [Completion(text=text, finish_reason="stop", token_count=30) for text in texts]
    return msgspec.structs.replace(made, completions=completions)


def reasoned(rng: random.Random) -> list[str]:
    return [f"{' '.join(rng.choices(WORDS, k=20))} <answer>{number}</answer>" for number in range(4)]


async def share(swarm: Transport, made: RolloutGroup, key: SigningKey) -> None:
    payload = encode(sign(made, key))
    await swarm.publish(subjects.rollouts(made.node), payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
async def test_a_copy_is_refused_at_whatever_replica_it_arrives(replicas: int, nats_server: MakeServer, tmp_path: Path) -> None:
    """Each replica has a folder of its own, as in Kubernetes, and reads its part of the swarm's
    stream.
    """
    rng, url = random.Random(3), nats_server().url
    swarm = await connect(url, name="others")
    await ensure_swarm_streams(swarm)
    async with AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(verifier(configured("alpha", url, tmp_path / str(number), intake_groups_per_s=200.0)))
            for number in range(replicas)
        ]

        def counted(name: str) -> list[float]:
            return [service.status.get(name) for service in services]

        bodies = [with_texts(group("beta", number), reasoned(rng)) for number in range(ORIGINALS)]
        for number, body in enumerate(bodies):
            await share(swarm, body, HONEST)
            if number % 4 == 3:  # now and then, so that more than one replica has its turn
                await until(lambda done=number + 1: sum(counted("accepted")) == done)  # type: ignore[misc]
        for number, body in enumerate(bodies):
            copy = msgspec.structs.replace(body, node="mallory", draw=number)
            if number % 2:
                filled = [f"{' '.join(rng.choices(WORDS, k=8))} {each.text}" for each in body.completions]
                copy = with_texts(copy, filled)
            await share(swarm, copy, COPIER)
            await asyncio.sleep(0.1)
        await until(lambda: sum(counted("accepted")) + sum(counted("refused")) == 2 * ORIGINALS)
        assert sum(counted("accepted")) == ORIGINALS
        assert sum(read > 0 for read in [a + b for a, b in zip(counted("accepted"), counted("refused"), strict=True)]) > 1
        assert {each.group.node for each in await scored(swarm, "alpha")} == {"beta"}
    await swarm.close()


@pytest.mark.slow
async def test_a_verifier_that_starts_again_knows_the_groups_of_before(nats_server: MakeServer, tmp_path: Path) -> None:
    rng, url = random.Random(4), nats_server().url
    swarm = await connect(url, name="others")
    await ensure_swarm_streams(swarm)
    bodies = [with_texts(group("beta", number), reasoned(rng)) for number in range(4)]
    async with verifier(configured("alpha", url, tmp_path / "before")) as before:
        for body in bodies:
            await share(swarm, body, HONEST)
        await until(lambda: before.status.get("accepted") == len(bodies))
    async with verifier(configured("alpha", url, tmp_path / "after")) as after:
        for body in bodies:
            await share(swarm, msgspec.structs.replace(body, node="mallory"), COPIER)
            await share(swarm, msgspec.structs.replace(body, node="beta-2"), HONEST)
        await until(lambda: after.status.get("refused") == 2 * len(bodies))
        assert after.status.get("accepted") == 0, "neither a copy nor a second name of the key"
    await swarm.close()


@pytest.mark.slow
@pytest.mark.parametrize("same_bytes", [True, False], ids=["identical bytes", "ever new ids under eight keys"])
async def test_copies_of_short_answers_hold_up_no_group_of_this_node(
    same_bytes: bool, nats_server: MakeServer, tmp_path: Path
) -> None:
    """Sixteen groups of 64 answers to one task are remembered, then copies of the first arrive as
    fast as the node reads. Nobody is blamed for copies of short answers.
    """
    rng, url = random.Random(1), nats_server().url
    config = configured("alpha", url, tmp_path, max_foreign_completions=64)
    swarm = await connect(url, name="others")
    await ensure_swarm_streams(swarm)
    keys = [SigningKey(new_seed()) for _ in range(8)]

    def short() -> list[str]:
        return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(64)]

    async def own_waits(first: int, until_s: float) -> list[float]:
        waits, number = [], first
        while time.monotonic() < until_s:
            began, number = time.monotonic(), number + 1
            done = alpha.status.get("scored_local") + 1
            await generate(node, group("alpha", number))
            await until(lambda: alpha.status.get("scored_local") >= done)  # noqa: B023
            waits.append(time.monotonic() - began)
        return sorted(waits)

    task = group("m0", 7)
    async with verifier(config) as alpha:
        node = await connect(url, name="generator")
        alone = await own_waits(0, time.monotonic() + 3)
        originals = [with_texts(msgspec.structs.replace(task, node=f"m{number % 8}", draw=number), short()) for number in range(16)]
        for number, body in enumerate(originals):
            await share(swarm, body, keys[number % 8])
        await until(lambda: alpha.status.get("accepted") == 16)
        seen = alpha.status.get("refused")
        copies = [
            msgspec.structs.replace(
                originals[0], node="copier" if same_bytes else f"c{number % 8}", draw=0 if same_bytes else number
            )
            for number in range(1 if same_bytes else 1600)
        ]
        copiers = [SigningKey(new_seed()) for _ in range(8)]
        payloads = [encode(sign(body, copiers[number % 8])) for number, body in enumerate(copies)]
        for number in range(1600):
            payload = payloads[number % len(payloads)]
            subject = subjects.rollouts(copies[number % len(payloads)].node)
            await swarm.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=f"flood {number}")
        began, cpu_s = time.monotonic(), time.process_time()
        attacked = await own_waits(1000, began + ATTACK_S)
        used = (time.process_time() - cpu_s) / (time.monotonic() - began)
        looked_at = alpha.status.get("refused") - seen
        await node.close()
    await swarm.close()
    assert looked_at > 300
    assert attacked[len(attacked) // 2] < 0.1 + 3 * alone[len(alone) // 2], (alone, attacked)
    assert used < 0.7, "of a processor, with all that this test does"

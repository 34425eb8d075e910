"""A whole verifier against senders whose groups are slow to score: a real server, the real border
and sandbox.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from services.verifier import reputation
from services.verifier.fair_queue import IN_WORK_PER_SENDER
from services.verifier.reputation import GRACE_S
from services.verifier.sharing import Content, sign
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.contracts.messages import RolloutGroup
from shared.identity.keys import SigningKey, new_seed
from shared.registry import VERIFIERS
from shared.tasks.prompt import text_task
from shared.transport.base import Transport
from tests.integration.installed_verifier import OBEYS, install
from tests.integration.running_verifier import configured, generate, group, scored, until, verifier
from tests.long_forms import FULL
from tests.nats_server import NatsServer

MakeServer = Callable[..., NatsServer]
PATIENCE_S = 150.0
HANG = "burn 600"
HANGS_S = 1.0
"""CPU time of a group of nothing but hangs: it ends at the first."""
SLOW_AND_RIGHT = 24 if FULL else 16


@pytest.fixture(autouse=True)
def obedient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "installed"
    folder.mkdir()
    install(folder, monkeypatch, "obeys", OBEYS)
    yield
    VERIFIERS.look_again()


def slow_to_score(url: str, folder: Path, **settings: object) -> NodeConfig:
    config = configured("alpha", url, folder, **settings)
    tasks = [spec.model_copy(update={"verifier": "obeys"}) for spec in config.tasks]
    return config.model_copy(update={"tasks": tasks})


async def share(swarm: Transport, key: SigningKey, node: str, body: RolloutGroup) -> None:
    payload = encode(sign(body, key, Content("text")))
    stream = subjects.SWARM_ROLLOUTS
    await swarm.publish(subjects.rollouts(node), payload, stream=stream, message_id=content_id(payload))


@pytest.mark.parametrize("grace_s", [5.0, pytest.param(GRACE_S, marks=pytest.mark.long)])
async def test_hangs_are_blamed_by_their_cost_and_what_a_quarantined_key_has_waiting_is_dropped(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    """All of the grace is burnt, so that the short form has a smaller one, and a smaller bound."""
    monkeypatch.setattr(reputation, "GRACE_S", grace_s)
    config = slow_to_score(nats_server().url, tmp_path, foreign_group_s=60.0)
    slow, honest = SigningKey(new_seed()), SigningKey(new_seed())
    sent = 30
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for index in range(sent):
            await share(alpha.swarm, slow, "mallory", group("mallory", index, [HANG] * 4))
        for index in range(10):
            await share(alpha.swarm, honest, "beta", group("beta", index))
        await generate(alpha.node, *(group("alpha", index) for index in range(20)))
        await until(lambda: alpha.status.get("scored_local") == 20, PATIENCE_S)
        await until(lambda: alpha.status.get("accepted") == 10, PATIENCE_S)
        await until(lambda: alpha.status.get("refused") == sent, PATIENCE_S)
        cost, timeouts = alpha.status.get("refused_scoring_cost"), alpha.status.get("refused_unknown_reward")
        dropped = alpha.status.get("refused_quarantined")
        taken = Counter(each.group.node for each in await scored(alpha.node, "alpha"))
        metrics = generate_latest(alpha.registry).decode()
    print(f"timeouts {timeouts:g}, then quarantine ({cost:g}), dropped or refused unread {dropped:g}")
    assert taken == {"alpha": 20, "beta": 10}
    # The grace is used up after a handful of groups, and no group is judged after that.
    assert cost + timeouts <= grace_s / HANGS_S + 3
    assert dropped == sent - cost - timeouts
    assert 'swarm_sandbox_protections{protection="seccomp"}' in metrics


async def test_one_slow_answer_now_and_then_costs_an_honest_sender_nothing_but_that_group(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    config = slow_to_score(nats_server().url, tmp_path, foreign_group_s=60.0)
    key = SigningKey(new_seed())
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for index in range(SLOW_AND_RIGHT):
            answers = None if index % 8 else ["wrong", HANG]
            await share(alpha.swarm, key, "beta", group("beta", index, answers))
        slow = SLOW_AND_RIGHT / 8
        await until(lambda: alpha.status.get("accepted") == SLOW_AND_RIGHT - slow, PATIENCE_S)
        await until(lambda: alpha.status.get("refused_unknown_reward") == slow, PATIENCE_S)
        assert (alpha.status.get("refused"), alpha.status.get("senders_quarantined")) == (slow, 0)
        assert alpha.status.get("score_timeouts") == SLOW_AND_RIGHT / 8


async def test_a_sender_has_few_groups_in_work_at_once(nats_server: MakeServer, tmp_path: Path) -> None:
    config = slow_to_score(nats_server().url, tmp_path, foreign_group_s=60.0)
    slow, honest = SigningKey(new_seed()), SigningKey(new_seed())
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for index in range(100):
            await share(alpha.swarm, slow, "mallory", group("mallory", index, ["burn 0.4"] * 2))
        await asyncio.sleep(1.0)
        await share(alpha.swarm, honest, "beta", group("beta", 0))
        await until(lambda: alpha.status.get("accepted") >= 1, PATIENCE_S)

        async def beta_is_in() -> bool:
            return any(each.group.node == "beta" for each in await scored(alpha.node, "alpha"))

        await until(beta_is_in, PATIENCE_S)
        taken = Counter(each.group.node for each in await scored(alpha.node, "alpha"))
    assert taken["mallory"] < 100 - IN_WORK_PER_SENDER, "and did not wait for all of the other's"


async def test_many_keys_of_dear_groups_do_not_keep_a_cheap_sender_from_the_scorers(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    """Sixteen keys with four groups in work each used to hold all places; the scorers' time is
    dealt out to those that got in.
    """
    config = slow_to_score(nats_server().url, tmp_path, foreign_group_s=60.0)
    dear, honest = [SigningKey(new_seed()) for _ in range(16)], SigningKey(new_seed())
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for index in range(8):
            for place, key in enumerate(dear):
                await share(alpha.swarm, key, f"mal{place}", group(f"mal{place}", index, ["burn 0.3"]))
        await until(lambda: alpha.status.get("accepted") >= 2, PATIENCE_S)
        before = alpha.status.get("accepted")
        for index in range(6):
            await share(alpha.swarm, honest, "beta", group("beta", index))

        async def beta_is_in() -> bool:
            return sum(each.group.node == "beta" for each in await scored(alpha.node, "alpha")) == 6

        await until(beta_is_in, PATIENCE_S)
        taken = Counter(each.group.node for each in await scored(alpha.node, "alpha"))
    print(f"dear groups scored meanwhile: {taken.total() - taken['beta'] - before:g} of {8 * len(dear)}")
    assert taken.total() - taken["beta"] - before < 4 * len(dear)


async def test_a_sender_of_other_tasks_only_is_named_once_with_the_remedy(nats_server: MakeServer, tmp_path: Path) -> None:
    config = configured("alpha", nats_server().url, tmp_path)
    other = configured("beta", "nats://127.0.0.1:1", tmp_path).tasks[0].model_copy(update={"config": {"max_value": 7}})
    key = SigningKey(new_seed())
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        made = group("beta", 0)
        ref = type(made.task.ref)(dataset="gcd", config=other.canonical_config, seed=1, index=0)
        task = text_task(ref, "?", "1")
        for index in range(10):
            await share(alpha.swarm, key, "beta", group("beta", index, task=task))
        await until(lambda: alpha.status.get("refused_task_not_allowed") == 10, PATIENCE_S)
        assert alpha.status.get("senders_other_tasks") == 1

"""Which swarm a viewer is shown: not one that the writer of a single entry or report chooses."""

from __future__ import annotations

import time

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.streams import ensure_swarm_streams
from shared.contracts.wire import DEFAULT_SWARM_ID, ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import CheckedStatement, SignatureStatus, sign_statement
from swarm_cli.invitation import Member, write_token
from swarm_cli.observe.evaluation_log import EvaluationLog
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.snapshot import SwarmState, look_at_hub, swarm_of
from swarm_cli.observe.status import named_hub
from tests.nats_server import own_plane
from tests.unit.test_invitation import invitation

NOW = 1_000_000.0
KEYS = {name: SigningKey(new_seed()) for name in ("alpha", "beta", "gamma", "eve")}


def record(node: str, key: SigningKey, at: float, model: str = "m") -> NodeRecord:
    identity = ModelIdentity(name=model, tokenizer_hash="a" * 64)
    return NodeRecord(
        node=node, public_key=key.public_key, model=identity, tasks=["gcd"], policy_version=1, software="s", updated_at=at
    )


def listed(node: str, swarm: str, at: float = NOW) -> NodeState:
    entry = CheckedStatement(record(node, KEYS["eve"], at), SignatureStatus.SIGNED, KEYS["eve"].public_key, swarm)
    return NodeState(node, entry=entry)


def test_the_swarm_that_most_nodes_say_is_shown_whatever_the_newest_entry_says() -> None:
    nodes = [listed("alpha", "run-1"), listed("beta", "run-1"), listed("eve", "x", NOW + 299)]
    assert swarm_of(nodes, (), DEFAULT_SWARM_ID, NOW) == "run-1"
    assert swarm_of([*nodes, listed("mallory", "x", NOW - 1)], (), DEFAULT_SWARM_ID, NOW) == "run-1", "the future is not newer"
    assert swarm_of(nodes, ("eve",), DEFAULT_SWARM_ID, NOW) == "x", "the nodes on this server come first"
    assert swarm_of(nodes, ("eve",), "run-9", NOW) == "run-9", "and the configured one before all"
    assert swarm_of([], (), DEFAULT_SWARM_ID, NOW) is None


async def observed(swarm: str | None, *forged_for: str) -> SwarmState:
    """A hub with three nodes in run-1, on which eve's key speaks for alpha in other swarms."""
    hub, now = await own_plane(), time.time()
    await ensure_swarm_streams(hub)

    async def says(node: str, key: SigningKey, swarm: str, rate: float) -> None:
        said = EvalReport(
            node=node, policy_version=1, created_at=now, n=8, pass_rate=rate, mean_reward=rate, per_task={}, seconds=1.0
        )
        payload = encode(sign_statement(said, key, swarm))
        await hub.publish(subjects.evals(node), payload, stream=subjects.SWARM_EVALS, message_id=f"{node}{swarm}{rate}")

    for name in ("alpha", "beta", "gamma"):
        await says(name, KEYS[name], "run-1", 0.25)
        await hub.kv.put(
            subjects.SWARM_NODES_BUCKET, name, encode(sign_statement(record(name, KEYS[name], now), KEYS[name], "run-1"))
        )
    for other in forged_for:
        await says("alpha", KEYS["eve"], other, 1.0)
        forged = record("alpha", KEYS["eve"], now, "forged")
        await hub.kv.put(subjects.SWARM_NODES_BUCKET, "alpha", encode(sign_statement(forged, KEYS["eve"], other)))
    return await look_at_hub(hub, EvaluationLog(swarm=swarm), swarm)


async def test_a_spectator_is_not_shown_what_another_key_says_for_a_name_in_this_swarm_or_in_another() -> None:
    for swarm in ("run-1", None):
        for forged_for in ((), ("another",), ("run-1",), ("another", "run-1")):
            alpha = next(node for node in (await observed(swarm, *forged_for)).nodes if node.node == "alpha")
            assert alpha.newest_score is not None and alpha.newest_score.pass_rate == 0.25, (swarm, forged_for)
            assert (alpha.entry is None) == bool(forged_for), "an entry of another swarm or key is not the node's"


async def test_a_token_with_a_roster_shows_a_member_by_its_key_and_no_stranger_who_signed_first() -> None:
    hub, now = await own_plane(), time.time()
    await ensure_swarm_streams(hub)
    for name, key, rate in (("alpha", KEYS["eve"], 1.0), ("eve", KEYS["eve"], 1.0), ("alpha", KEYS["alpha"], 0.25)):
        said = EvalReport(
            node=name, policy_version=1, created_at=now, n=8, pass_rate=rate, mean_reward=rate, per_task={}, seconds=1.0
        )
        payload = encode(sign_statement(said, key, "run-1"))
        await hub.publish(subjects.evals(name), payload, stream=subjects.SWARM_EVALS, message_id=f"{name}{rate}")
        entry = encode(sign_statement(record(name, KEYS["eve"], now, "forged"), KEYS["eve"], "run-1"))
        await hub.kv.put(subjects.SWARM_NODES_BUCKET, name, entry)
    members = [Member(node="alpha", public_key=KEYS["alpha"].public_key)]
    with named_hub("", write_token(invitation(swarm_id="run-1", roster=members))) as seen:
        found = await look_at_hub(hub, EvaluationLog(roster=seen.roster, swarm=seen.swarm), seen.swarm)
    assert [(node.node, node.held_out, node.entry) for node in found.nodes] == [("alpha", "0.250 @1", None)]
    with named_hub("", write_token(invitation(swarm_id="run-1"))) as seen:
        assert seen.roster is None, "without a roster first keys are trusted"

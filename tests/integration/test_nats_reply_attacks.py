"""What the server answers goes where the asker says, and a direct get answers with bytes that the
asker stored itself. So every key tries, by every way of being answered, to have its own bytes
executed by JetStream or stored where it may not write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import nkeys
import pytest

from shared.contracts import subjects
from shared.identity.permissions import EVERYTHING, Permissions, node_role, swarm_node
from shared.roles import ROLES
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.transport.base import Transport
from swarm_cli.nats.server_config import MAX_CONNECTIONS_VARIABLE
from tests.integration.nats_users import everything, raw
from tests.secured_server import SecuredServer

NODE_STREAMS = tuple(f"NODE_ALPHA_{name}" for name in ("ROLLOUTS", "SCORED", "BATCHES", "DEAD", "POLICIES")) + ("KV_node_alpha",)
SWARM_STREAMS = (subjects.SWARM_ROLLOUTS, subjects.SWARM_EVALS, f"KV_{subjects.SWARM_NODES_BUCKET}")
POINTER = f"$KV.node_alpha.{subjects.POLICY_KEY}"

OWN = {
    "swarm": (subjects.rollouts("mallory"), subjects.SWARM_ROLLOUTS),
    "generator": (subjects.node_rollouts("alpha"), "NODE_ALPHA_ROLLOUTS"),
    "verifier": (subjects.node_scored("alpha"), "NODE_ALPHA_SCORED"),
    "sampler": (subjects.node_batches("alpha"), "NODE_ALPHA_BATCHES"),
    "trainer": (subjects.node_policies("alpha"), "NODE_ALPHA_POLICIES"),
}
"""Where each key may store bytes, and the stream in which it can read them again."""

FORBIDDEN_SUBJECTS = {
    "swarm": [
        subjects.rollouts("alpha"),
        f"blob.{subjects.rollouts('alpha')}",
        subjects.evals("alpha"),
        "$KV.swarm_nodes.alpha",
    ],
    "generator": [POINTER, subjects.node_scored("alpha"), subjects.node_batches("alpha"), "$KV.node_alpha.trainer"],
    "verifier": [POINTER, subjects.node_rollouts("alpha"), subjects.node_batches("alpha"), "$KV.node_alpha.ledger"],
    "sampler": [POINTER, subjects.node_rollouts("alpha"), subjects.node_scored("alpha"), "$KV.node_alpha.trainer"],
    "trainer": [
        subjects.node_rollouts("alpha"),
        subjects.node_scored("alpha"),
        subjects.node_batches("alpha"),
        "$KV.node_alpha.eval",
    ],
}
"""Where each key may not write."""


@pytest.fixture(scope="module", params=["text", "claims"])
def secured(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("attacked")
    server = SecuredServer(folder, ["alpha", "mallory"], accounts=request.param)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def victim(server: SecuredServer, attacker: str, folder: Path) -> AsyncIterator[Transport]:
    """The operator of the plane that `attacker` is on, with something in every stream that could be
    lost.
    """
    for made in ("node", "swarm"):
        await asyncio.to_thread(server.init, made, server.config("alpha", folder))
    config = server.config("alpha", folder, nats={"swarm_key_file": str(server.keys / "operator" / "swarm.nk")})
    if attacker == "swarm":
        plane = await connect_swarm_plane(config, "operator", timeout_s=10.0)
        kept = [
            (subjects.rollouts("alpha"), subjects.SWARM_ROLLOUTS),
            (subjects.evals("alpha"), subjects.SWARM_EVALS),
            ("$KV.swarm_nodes.alpha", "KV_swarm_nodes"),
        ]
    else:
        plane = await connect_node_plane(config, "operator")
        kept = [(subject, stream) for role, (subject, stream) in OWN.items() if role != "swarm"] + [(POINTER, "KV_node_alpha")]
    for subject, stream in kept:
        for number in range(2):
            await plane.publish(subject, b"kept", stream=stream, message_id=f"{attacker}-{subject}-{number}")
    try:
        yield plane
    finally:
        await plane.close()


async def remember_long(operator: Any, streams: Iterable[str]) -> None:
    """Make servers know a message again for longer than the test takes: the swarm's streams do for
    two seconds only, and what the attacker then publishes again would be stored.
    """
    for stream in streams:
        config = {**(await everything(operator))[stream][0], "duplicate_window": 600 * 10**9}
        answer = await operator.request(f"$JS.API.STREAM.UPDATE.{stream}", json.dumps(config).encode(), timeout=10)
        assert "error" not in json.loads(answer.data), answer.data


def administration(stream: str, config: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Requests that only an operator may make, as (subject, body)."""
    spy = {"stream_name": stream, "config": {"name": "spy", "durable_name": "spy", "ack_policy": "none", "deliver_policy": "all"}}
    fewer = {**config, "max_msgs": 1, "metadata": None}
    return [
        (f"$JS.API.CONSUMER.CREATE.{stream}.spy", json.dumps(spy).encode()),
        (f"$JS.API.STREAM.UPDATE.{stream}", json.dumps(fewer).encode()),
        ("$JS.API.STREAM.CREATE.EVIL", b'{"name": "EVIL", "subjects": ["evil.>"]}'),
        (f"$JS.API.STREAM.PURGE.{stream}", b""),
        (f"$JS.API.STREAM.MSG.DELETE.{stream}", b'{"seq": 1}'),
        (f"$JS.API.STREAM.DELETE.{stream}", b""),
    ]


async def answered_by_reading(client: Any, subject: str, stream: str, seq: int, reply: str) -> None:
    """Every form of a direct get that answers with the message at `seq` of one's own, its answer
    sent to `reply`.
    """
    forms = (
        {"seq": seq},
        {"last_by_subj": subject},
        {"seq": seq, "next_by_subj": subject},
        {"seq": seq, "batch": 1},
        {"multi_last": [subject], "batch": 1},
    )
    for form in forms:
        await client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(form).encode(), reply=reply)
    # The form of ADR-31 in which the subject is part of the request.
    await client.publish(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", reply=reply)


async def answered_otherwise(client: Any, attacker: str, subject: str, stream: str, message_id: str, reply: str) -> None:
    """Answers whose bytes are the server's: of publishing (again, so that nothing is stored),
    looking, and message tracing.
    """
    headers = {"Nats-Msg-Id": message_id}
    await client.publish(subject, b"again", reply=reply, headers=headers)
    await client.publish(subject, b"again", reply=client.new_inbox(), headers={**headers, "Nats-Trace-Dest": reply})
    await client.publish(f"$JS.API.STREAM.INFO.{stream}", b"", reply=reply)
    if attacker == "verifier":
        consumer = f"NODE_ALPHA_ROLLOUTS.{subjects.VERIFIER_CONSUMER}"
        await client.publish(f"$JS.API.CONSUMER.INFO.{consumer}", b"", reply=reply)
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{consumer}", b'{"batch": 1, "no_wait": true}', reply=reply)


async def stored_by(client: Any, subject: str, body: bytes, message_id: str) -> int:
    """Sequence of a message of one's own."""
    return int(json.loads((await client.request(subject, body, headers={"Nats-Msg-Id": message_id}, timeout=10)).data)["seq"])


@pytest.mark.parametrize("attacker", OWN)
async def test_a_reply_subject_gives_no_key_more_than_it_has(secured: SecuredServer, tmp_path: Path, attacker: str):
    assert await reached_by(secured, tmp_path, attacker) == []


@pytest.mark.parametrize(
    "attacker",
    [name if name in ("swarm", "trainer") else pytest.param(name, marks=pytest.mark.long) for name in OWN],
)
async def test_the_same_attacks_reach_streams_that_share_an_account_with_their_users(tmp_path: Path, attacker: str):
    """So that the test above means something: permissions alone stop none of these requests."""
    server = SharedAccountServer(tmp_path / "server", ["alpha", "mallory"]).start()
    try:
        reached = await reached_by(server, tmp_path, attacker)
    finally:
        server.stop()
    assert any(target.startswith("$JS.API.STREAM.") for target in reached)
    assert set(FORBIDDEN_SUBJECTS[attacker]) & set(reached)


class SharedAccountServer(SecuredServer):
    """The same keys and permissions, in one account a plane, streams included: what
    `swarm nats config` wrote once.
    """

    def configure(self, config: str = "", jetstream: str = "") -> None:
        """Replace the accounts of what `swarm nats config` printed."""
        start, end = self._text.index("accounts {"), self._text.index(f"{MAX_CONNECTIONS_VARIABLE}:")
        blocks = [self._account("SWARM", {name: f"{name}/swarm.nk" for name in (*self.nodes, "operator")}, swarm_node)]
        for node in self.nodes:
            keys = {role: f"{node}/{role}.nk" for role in (*ROLES, "operator")}
            blocks.append(self._account(f"NODE_{node.upper()}", keys, partial(node_role, node)))
        self._text = "\n".join([self._text[:start], "accounts {", *blocks, "}", self._text[end:]])
        super().configure(config, jetstream)

    def _account(self, name: str, keys: Mapping[str, str], rights: Callable[[str], Permissions]) -> str:
        users = []
        for user, file in keys.items():
            allowed = EVERYTHING if user == "operator" else rights(user)
            publish, subscribe = (json.dumps(subjects) for subjects in (allowed.publish, allowed.subscribe))
            key = nkeys.from_seed(bytearray((self.keys / file).read_bytes().strip())).public_key.decode()
            may = f"permissions {{ publish: {{ allow: {publish} }}, subscribe: {{ allow: {subscribe} }} }}"
            users.append(f"{{ nkey: {key}, {may} }}")
        return f"{name} {{\n  jetstream: enabled\n  users: [\n" + "\n".join(users) + "\n  ]\n}"


async def reached_by(server: SecuredServer, folder: Path, attacker: str) -> list[str]:
    """Subjects for which an attack changed something.

    In the order of harm, so that the next ones still find what they are meant for. The first stream
    that is gone ends it.
    """
    subject, own_stream = OWN[attacker]
    node = "mallory" if attacker == "swarm" else "alpha"
    streams = SWARM_STREAMS if attacker == "swarm" else NODE_STREAMS
    async with victim(server, attacker, folder):
        key = "operator/swarm.nk" if attacker == "swarm" else "alpha/operator.nk"
        operator = await raw(server, server.keys / key, "_INBOX_attacked.operator", [])
        client = await raw(server, server.keys / node / f"{attacker}.nk", f"_INBOX_{node}.{attacker}", [])
        try:
            await remember_long(operator, streams)
            configs = {stream: (await everything(operator))[stream][0] for stream in streams}
            attacks = [(target, b"forged") for target in FORBIDDEN_SUBJECTS[attacker]]
            attacks += [attack for stream in streams for attack in administration(stream, configs[stream])]
            rights = () if attacker == "swarm" else node_role("alpha", attacker).publish
            attacks = [(target, body) for target, body in attacks if target not in rights]
            # The names under which accounts import such requests (`swarm_cli.nats.server_config`).
            attacks += [(target.removeprefix("$JS."), body) for target, body in attacks if target.startswith("$JS.")]
            baits, reached = dict[str, int](), list[str]()
            for number, (target, body) in enumerate(attacks):
                baits[target] = await stored_by(client, subject, body, f"{attacker}-bait-{number}")
                read = json.dumps({"seq": baits[target]}).encode()
                got = await client.request(f"$JS.API.DIRECT.GET.{own_stream}", read, timeout=10)
                assert got.data == body, "what follows is answered, only not where it asks for"
            for number, (target, _) in enumerate(attacks):
                before = await everything(operator)
                await answered_otherwise(client, attacker, subject, own_stream, f"{attacker}-bait-{number}", target)
                await answered_by_reading(client, subject, own_stream, baits[target], target)
                await client.flush()
                await asyncio.sleep(0.02)
                after = await everything(operator)
                if after != before:
                    reached.append(target)
                if own_stream not in after:
                    break
            # What is on its way may take its time on a busy machine.
            settled = await everything(operator)
            await asyncio.sleep(0.5)
            assert await everything(operator) == settled
            return reached
        finally:
            await client.close()
            await operator.close()

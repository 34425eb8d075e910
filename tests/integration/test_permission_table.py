"""Who may do what on a secured server: one table, which is also the page's, tried on a real server.

Every user tries every verb on every stream and key of both planes. What the table says it may do
is answered, and the server refuses all else. The table is written out and not derived from the
code, so that a permission too many is seen.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.nats_users import raw
from tests.secured_server import SecuredServer

PAGE = Path("docs/security.md")
NODE_TABLE = """\
| on the node's plane | generator | verifier | sampler | trainer |
|---|---|---|---|---|
| `NODE_<ID>_ROLLOUTS` | publish, get, info, consumer | get, info, consumer, next | info, consumer | info, consumer |
| `NODE_<ID>_ROLLOUTS_BLOBS` | publish, get, info, delete | get, info, delete | | |
| `NODE_<ID>_SCORED` | info | publish, get, info | get, info, purge | info |
| `NODE_<ID>_SCORED_BLOBS` | | publish, get, info, delete | get, info, purge | |
| `NODE_<ID>_BATCHES` | info | info | publish, get, info | get, info, purge |
| `NODE_<ID>_BATCHES_BLOBS` | | | publish, get, info, delete | get, info, purge |
| `NODE_<ID>_DEAD` | info | publish, get, info | info | info |
| `NODE_<ID>_DEAD_BLOBS` | | publish, get, info, delete | | |
| `NODE_<ID>_NAME` | publish, get, info | publish, get, info | publish, get, info | publish, get, info |
| `NODE_<ID>_POLICIES` | get, info | | | publish, get, info, purge |
| `NODE_<ID>_POLICIES_BLOBS` | | | | info |
| bucket `node_<id>` | get, info | get, info | get, info | get, info |
| key `eval` | put | | watch | |
| key `sampler` | watch | | put | |
| key `policy` | watch | | | put |
| key `trainer` | | | watch | put |
| key `bans` | | | | |
| keys `ledger`, `eval_turn`, `policy_refused`, `lease.generator.*`, `status.generator.*` | put | | | |
| keys `intake`, `reward_values`, `senders.*`, `reputation`, `swarm_name`, `lease.verifier.*`, `status.verifier.*` | | put | | |
| keys `lease.sampler`, `status.sampler.0` | | | put | |
| keys `findings`, `lease.trainer`, `status.trainer.0` | | | | put |
"""
SWARM_TABLE = """\
| on the swarm's plane | a node | observer | watch |
|---|---|---|---|
| `SWARM_ROLLOUTS` | publish, get | | |
| `SWARM_ROLLOUTS_BLOBS` | publish, get | | |
| `SWARM_EVALS` | publish, get | get | |
| bucket `swarm_nodes` | get | get | |
| key `<node>` | put | | |
| advisories of requests | | | watch |
"""

SUBJECTS = {
    **{
        f"NODE_<ID>_{name}{suffix}": [f"{chunks}node.<id>.{name.lower()}"]
        for name in ("ROLLOUTS", "SCORED", "BATCHES", "DEAD")
        for suffix, chunks in (("", ""), ("_BLOBS", "blob."))
    },
    "NODE_<ID>_NAME": ["node.<id>.name"],
    "NODE_<ID>_POLICIES": ["node.<id>.policies"],
    "SWARM_ROLLOUTS": ["swarm.rollouts.v3.<id>"],
    "SWARM_ROLLOUTS_BLOBS": ["blob.swarm.rollouts.v3.<id>"],
    "SWARM_EVALS": ["swarm.evals.v1.<id>"],
}
"""What `publish` means. On the swarm's plane a node has one subject of each stream."""

API = {
    "get": ["DIRECT.GET.{}"],
    "info": ["STREAM.INFO.{}"],
    "purge": ["STREAM.PURGE.{}"],
    "delete": ["STREAM.MSG.DELETE.{}"],
    "consumer": ["CONSUMER.INFO.{}.verifier"],
    "next": ["CONSUMER.MSG.NEXT.{}.verifier"],
    "what nobody may do": [
        "DIRECT.GET.{}.node.alpha.scored",
        "STREAM.MSG.GET.{}",
        *(
            f"STREAM.{verb}.{{}}"
            for verb in ("CREATE", "UPDATE", "DELETE", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN", "PEER.REMOVE")
        ),
        "CONSUMER.CREATE.{}",
        "CONSUMER.CREATE.{}.spy",
        "CONSUMER.CREATE.{}.spy.node.alpha.scored",
        "CONSUMER.DURABLE.CREATE.{}.spy",
        "CONSUMER.INFO.{}.spy",
        "CONSUMER.MSG.NEXT.{}.spy",
        *(f"CONSUMER.{verb}.{{}}.verifier" for verb in ("DELETE", "PAUSE", "RESET", "UNPIN", "LEADER.STEPDOWN")),
        "CONSUMER.NAMES.{}",
        "CONSUMER.LIST.{}",
    ],
}
ELSEWHERE = [
    *(f"$JS.API.{request}" for request in ("INFO", "STREAM.NAMES", "STREAM.LIST", "ACCOUNT.PURGE.SWARM", "META.LEADER.STEPDOWN")),
    "$SYS.REQ.SERVER.PING",
    "$SYS.REQ.ACCOUNT.SWARM.CONNZ",
    "$KV.node_alpha.name",
    "$KV.node_alpha.anything",
    "$KV.node_alpha.senders.x.y",
    "$JS.EVENT.ADVISORY.API",
    "_INBOX.x",
    "_INBOX_beta.generator.x",
    "anything",
]
ADVISORIES = "*.$JS.EVENT.ADVISORY.API"
KV_VERBS: dict[str, dict[str, str]] = {
    "put": {},
    "create": {"Nats-Expected-Last-Subject-Sequence": "0"},
    "delete": {"KV-Operation": "DEL"},
    "purge": {"KV-Operation": "PURGE", "Nats-Rollup": "sub"},
}
"""All four are messages to the key's subject, so who may do one may do all; the bucket takes no
purges, whoever sends them.
"""
BODIES = {"DIRECT.GET": {"seq": 1}, "STREAM.PURGE": {"seq": 1}, "STREAM.MSG.DELETE": {"seq": 10**9}}
NEXT = {"batch": 1, "no_wait": True}


def rows(table: str) -> Iterator[tuple[str, str, list[str]]]:
    """Each row's name, user and verbs; a row of several keys is one row for each."""
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    for names, *cells in lines:
        several = [f"key {name}" for name in names.removeprefix("keys ").split(", ")] if names.startswith("keys ") else [names]
        for name in several:
            for user, cell in zip(head[1:], cells, strict=True):
                yield name, user, [verb for verb in cell.split(", ") if verb]


def subjects_of(row: str, verb: str, node: str) -> list[str]:
    if row == "advisories of requests":
        return [ADVISORIES] if verb == "watch" else []
    kind, _, quoted = row.rpartition(" ")
    name = quoted.strip("`").replace("<ID>", node.upper()).replace("<id>", node)
    if kind == "key":
        bucket, key = ("swarm_nodes", node) if name == "<node>" else (f"node_{node}", name.replace("*", "pod-0"))
        return [f"$KV.{bucket}.{key}"] if verb in ("put", "watch") else []
    if verb == "publish":
        return [each.replace("<id>", node) for each in SUBJECTS.get(quoted.strip("`"), [])]
    stream = f"KV_{name}" if kind == "bucket" else name
    return [f"$JS.API.{request.format(stream)}" for request in API.get(verb, [])]


def everything(node: str) -> set[str]:
    """The subjects of all verbs in all rows."""
    verbs = [*API, "publish", "put"]
    return {
        subject
        for table in (NODE_TABLE, SWARM_TABLE)
        for row, _, _ in rows(table)
        for verb in verbs
        for subject in subjects_of(row, verb, node)
    }


def allowed(table: str, user: str, *, watched: bool = False) -> set[str]:
    """Return what the table allows a user of alpha's."""
    return {
        subject
        for row, whose, verbs in rows(table)
        for verb in verbs
        if whose == user and (verb == "watch") == watched
        for subject in subjects_of(row, verb, "alpha")
    }


USERS = [
    *((NODE_TABLE, role, f"alpha/{role}.nk", f"_INBOX_alpha.{role}") for role in ("generator", "verifier", "sampler", "trainer")),
    (SWARM_TABLE, "a node", "alpha/swarm.nk", "_INBOX_alpha.raw"),
    (SWARM_TABLE, "observer", "operator/observer.nk", "_INBOX_observer"),
    (SWARM_TABLE, "watch", "operator/watch.nk", "_INBOX_watch"),
]


def test_the_page_shows_this_table() -> None:
    text = PAGE.read_text()
    assert NODE_TABLE in text
    assert SWARM_TABLE in text


def test_no_key_and_no_stream_has_two_roles_that_write_it_but_the_name_which_takes_one_message() -> None:
    writers: dict[str, set[str]] = {}
    for row, user, verbs in rows(NODE_TABLE):
        if {"put", "publish"} & set(verbs):
            writers.setdefault(row, set()).add(user)
    assert [row for row, users in writers.items() if len(users) > 1] == ["`NODE_<ID>_NAME`"]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("table")
    server = SecuredServer(folder, ["alpha", "beta"])
    server.start()
    for node in server.nodes:
        server.init("node", server.config(node, folder))
    server.init("swarm", server.config("alpha", folder))
    yield server
    server.stop()


class Asked:
    """What a client asked with each of some subjects, and what came of it."""

    def __init__(self, client: Any, errors: list[str]) -> None:
        self._client, self._errors = client, errors
        self.answered: set[str] = set()
        errors.clear()

    def refused(self, subjects: set[str], kind: str) -> set[str]:
        said = {error.lower() for error in self._errors}
        told = {part.split('"')[1] for part in said if f'{kind} to "' in part}
        return {subject for subject in subjects if subject.lower() in told}

    async def publish(self, subjects: set[str]) -> None:
        prefix = self._client.new_inbox()
        numbered = dict(enumerate(sorted(subjects)))

        async def answer(message: Any) -> None:
            self.answered.add(numbered[int(message.subject.rpartition(".")[2])])

        await self._client.subscribe(f"{prefix}.*", cb=answer)
        for number, subject in numbered.items():
            request = subject.removeprefix("$JS.API.")
            body = next((body for start, body in BODIES.items() if request.startswith(start)), {})
            body = NEXT if request.startswith("CONSUMER.MSG.NEXT") else body
            variants = KV_VERBS.values() if subject.startswith("$KV.") else [{"Nats-Expected-Last-Sequence": str(10**9)}]
            for headers in variants:
                is_request = subject.startswith("$JS.")
                text = json.dumps(body).encode() if is_request and body else b""
                await self._client.publish(subject, text, reply=f"{prefix}.{number}", headers=None if is_request else headers)
        await self._client.flush()


async def until_told(done: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)  # for answers and refusals that should not come


@pytest.mark.slow
@pytest.mark.parametrize(("table", "user", "key", "prefix"), USERS, ids=[user for _, user, _, _ in USERS])
async def test_each_user_may_do_what_the_table_says_and_nothing_else(
    secured: SecuredServer, table: str, user: str, key: str, prefix: str
) -> None:
    errors: list[str] = []
    client = await raw(secured, secured.keys / key, prefix, errors)
    try:
        wanted = everything("alpha") | everything("beta") | set(ELSEWHERE)
        may = allowed(table, user)
        assert may < wanted
        asked = Asked(client, errors)
        await asked.publish(wanted)
        await until_told(lambda: may <= asked.answered and wanted - may <= asked.refused(wanted, "publish"), "not all is told")
        assert asked.answered == may
        assert asked.refused(wanted, "publish") == wanted - may

        acks = {
            f"$JS.ACK.{account}NODE_{node}_ROLLOUTS.verifier.1.1.1.1.1" for account in ("", "_.x.") for node in ("ALPHA", "BETA")
        }
        asked = Asked(client, errors)
        await asked.publish(acks)
        no_acks = acks if user != "verifier" else {ack for ack in acks if "BETA" in ack}
        await until_told(lambda: no_acks <= asked.refused(acks, "publish"), "not all is told")
        assert asked.refused(acks, "publish") == no_acks

        keys = {subject for subject in wanted if subject.startswith(("$KV.", "node.", "swarm.", "blob."))}
        others = {
            f"_INBOX_{node}.{role}.x" for node in ("alpha", "beta") for role in ("generator", "verifier", "sampler", "trainer")
        }
        heard = {each for each in keys | others | {">", "$JS.>", "$KV.>", "$SYS.>", "_INBOX.>", "node.>", "swarm.>", ADVISORIES}}
        may_hear = allowed(table, user, watched=True) | {
            each for each in others if each.startswith(f"{prefix.removesuffix('.raw')}.")
        }
        asked = Asked(client, errors)
        for subject in sorted(heard):
            await client.subscribe(subject)
        await client.flush()
        await until_told(lambda: heard - may_hear <= asked.refused(heard, "subscription"), "not all is told")
        assert asked.refused(heard, "subscription") == heard - may_hear
    finally:
        await client.close()

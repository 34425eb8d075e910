"""The accounts of a server as claims (JWTs) in its own resolver: for a hub whose nodes come and go
by the hundred. A node more is one message to the running servers, and no reload.

`account_claims` translates the same accounts that a configuration file has. No export names a node,
so the account with the swarm's streams stays as it is when one comes. Exports are open to all,
because only who holds the operator's key for claims can write an import.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.identity import keys
from shared.identity.permissions import ADVISORY, SWARM_ACCOUNT, Permissions, swarm_node
from shared.roles import OPERATOR, WATCH
from shared.transport.base import Deadline, NotConnected, TransportError
from shared.transport.nats import claims
from shared.transport.nats.connection import Connection, Options
from swarm_cli.errors import CommandError
from swarm_cli.nats.server_config import (
    ANSWERED_BY_STREAMS,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_VARIABLE,
    ROLE_LIMITS,
    WATCH_ACCOUNT,
    Account,
    Limits,
    User,
    guests_of,
    local_name,
    quoted,
    refuse_shared_keys,
)

SYSTEM_ACCOUNT = "SYS"
_PUSH, _PING = "$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.SERVER.PING"
_ANSWER_S, _SILENCE_S = 10.0, 1.0
_UNLIMITED = Limits(connections=-1, subscriptions=-1, leaves=-1, payload=-1)
CLAIMS_KEY = "claims"
"""Name of the operator's key that signs accounts and brings them to the servers."""


def signing_key(folder: Path) -> claims.Key:
    """The operator's key for claims, made if it is missing. Who holds it admits nodes.

    Raises:
        CommandError: the file cannot be used.
    """
    path = folder / OPERATOR / f"{CLAIMS_KEY}.nk"
    try:
        keys.load_or_create(path)
        return claims.key_of(path.read_text())
    except keys.KeyFileError as error:
        raise CommandError(str(error)) from None


def account_claims(accounts: Sequence[Account], key: claims.Key, *, watch_key: str = "", domain: str = "") -> dict[str, str]:
    """The signed claims of all accounts by name, as `render_accounts` writes them as text.

    Raises:
        CommandError: two users have the same key.
    """
    refuse_shared_keys(accounts, watch_key)
    bodies: dict[str, dict[str, Any]] = {}
    for account in accounts:
        bodies[account.name] = _with_streams(account)
        for guest in guests_of(account, domain):
            imports = [_import("service", account.name, subject, local_name(subject)) for subject in guest.services]
            imports += [_import("stream", writer, subject, subject) for subject, writer in guest.heard_of]
            bodies[guest.name] = {
                **_limited(guest.limits),
                **_signing_keys([guest.user], guest.limits),
                "imports": imports,
                "exports": [_export("stream", subject) for subject in guest.hearers],
                "mappings": {said: [{"subject": meant, "weight": 100}] for said, meant in guest.mappings.items()},
            }
    if watch_key:
        watcher = User(WATCH, watch_key, Permissions((), (f"*.{ADVISORY}",)))
        imports = [_import("stream", account.name, ADVISORY, f"{account.name}.{ADVISORY}") for account in accounts]
        bodies[WATCH_ACCOUNT] = {**_limited(ROLE_LIMITS), **_signing_keys([watcher], ROLE_LIMITS), "imports": imports}
    return {name: _signed(name, body, key) for name, body in bodies.items()}


def _signed(name: str, body: dict[str, Any], key: claims.Key) -> str:
    return claims.signed("account", claims.identity(name), name, body, key, claims.OPERATOR)


def _with_streams(account: Account) -> dict[str, Any]:
    storage = account.storage
    guests = [subject for user in account.guests for subject in user.permissions.publish]
    subjects = swarm_node("*").publish if account.name == SWARM_ACCOUNT else guests
    room = (storage.gib * 2**30, storage.streams) if storage else (-1, -1)
    limits = {"mem_storage": 0 if storage else -1, "disk_storage": room[0], "streams": room[1], "consumer": -1}
    return {
        **_limited(_UNLIMITED, limits),
        **_signing_keys(account.operators, _UNLIMITED),
        "exports": [*(_export("service", subject) for subject in dict.fromkeys(subjects)), _export("stream", ADVISORY)],
    }


def _limited(limits: Limits, more: Mapping[str, int] | None = None) -> dict[str, Any]:
    named = {"subs": limits.subscriptions, "conn": limits.connections, "leaf": limits.leaves, "payload": limits.payload}
    return {"limits": {**named, "data": -1, "imports": -1, "exports": -1, "wildcards": True, **(more or {})}}


def _signing_keys(users: Sequence[User], limits: Limits) -> dict[str, Any]:
    """Each user's own key, bound to its permissions. Without a key (of a node that is shut out)
    there is none.
    """
    return {
        "signing_keys": [
            {
                "kind": "user_scope",
                "key": claims.as_kind(user.public_key, claims.ACCOUNT),
                "role": user.name,
                "template": {
                    "pub": _allowed(user.permissions.publish),
                    "sub": _allowed(user.permissions.subscribe),
                    "subs": limits.subscriptions,
                    "data": -1,
                    "payload": limits.payload,
                },
            }
            for user in users
            if user.public_key
        ]
    }


def _allowed(subjects: Sequence[str]) -> dict[str, list[str]]:
    return {"allow": list(subjects)} if subjects else {"deny": [">"]}


def _import(kind: str, account: str, subject: str, local: str) -> dict[str, str]:
    return {"name": subject, "subject": subject, "account": claims.identity(account), "type": kind, "local_subject": local}


def _export(kind: str, subject: str) -> dict[str, str]:
    if kind == "stream":
        return {"name": subject, "subject": subject, "type": kind}
    answers = "Stream" if subject.startswith(ANSWERED_BY_STREAMS) else "Singleton"
    return {"name": subject, "subject": subject, "type": kind, "response_type": answers}


def render_claims(tokens: Mapping[str, str], key: claims.Key, resolver_dir: str) -> list[str]:
    """The lines of a configuration that take the place of `accounts`. The accounts in it are those
    that the server has if `resolver_dir` is empty or lost; newer ones that were pushed stay.
    """
    operator = claims.as_kind(claims.public_key(key), claims.OPERATOR)
    system = claims.identity(SYSTEM_ACCOUNT)
    pusher = User(CLAIMS_KEY, claims.public_key(key), Permissions((_PUSH, _PING), (f"{_INBOX}.>",)))
    body = {**_limited(_UNLIMITED), **_signing_keys([pusher], _UNLIMITED)}
    trusted = claims.signed("operator", operator, "swarm", {"system_account": system}, key, claims.OPERATOR)
    preloaded = {SYSTEM_ACCOUNT: _signed(SYSTEM_ACCOUNT, body, key), **tokens}
    return [
        "# Nodes are added and shut out by `--push`, without a reload. Who is merely left out here keeps its account.",
        f"operator: {trusted}",
        f"system_account: {system}",
        "resolver {",
        "  type: full",
        f"  dir: {quoted(resolver_dir)}",
        "  allow_delete: false",
        '  interval: "10s"',
        "}",
        "resolver_preload {",
        *(line for name, token in preloaded.items() for line in (f"  # {name}", f"  {claims.identity(name)}: {token}")),
        "}",
        f"{MAX_CONNECTIONS_VARIABLE}: {MAX_CONNECTIONS}",
    ]


_INBOX = "_INBOX_claims"


@dataclass(frozen=True, slots=True)
class Pushed:
    """What the servers said to the accounts that they were sent."""

    servers: int
    """Servers that answer."""
    refusals: Mapping[str, str]
    """By account: why not every server has it."""


async def push(url: str, key_file: Path, ca_file: str, tokens: Mapping[str, str]) -> Pushed:
    """Give the accounts to all servers of a hub that are running. One that is away gets them from
    the others when it is back.

    Raises:
        TransportError: no server answers, or it has another operator.
    """
    connection = Connection(
        Options(
            url=url,
            name=CLAIMS_KEY,
            key_file=str(key_file),
            ca_file=ca_file or None,
            inbox_prefix=_INBOX,
            accounts=(SYSTEM_ACCOUNT,),
            hub=True,
        )
    )
    await connection.open(_ANSWER_S)
    try:
        servers = len([answer async for answer in _answers(connection, _PING, b"", 0)])
        if not servers:
            raise NotConnected(f"{url}: no server says that it is there", "run this again")
        refusals: dict[str, str] = {}
        for name, token in tokens.items():
            answers = [answer async for answer in _answers(connection, _PUSH, token.encode(), servers)]
            faults = [str(answer["error"].get("description", "")) for answer in answers if answer.get("error")]
            if len(answers) < servers:
                faults.append(f"{len(answers)} of {servers} servers answered")
            if faults:
                refusals[name] = "; ".join(dict.fromkeys(faults))
        return Pushed(servers, refusals)
    finally:
        await connection.close()


async def _answers(connection: Connection, subject: str, payload: bytes, expected: int) -> AsyncIterator[dict[str, Any]]:
    """What the servers answer: `expected` of them, or with 0 until none has for a second."""
    deadline, seen = Deadline(_ANSWER_S), 0
    async with connection.replies(subject, payload) as queue:
        while not deadline.passed and (not expected or seen < expected):
            try:
                async with asyncio.timeout(_SILENCE_S if seen and not expected else deadline.left_s):
                    message = await queue.get()
            except TimeoutError:
                return
            seen += 1
            yield json.loads(message.data)


def push_now(url: str, key_file: Path, ca_file: str, tokens: Mapping[str, str]) -> int:
    """Push, and return how many servers have all accounts.

    Raises:
        CommandError: with what a server does not have, and the remedy.
    """
    try:
        pushed = asyncio.run(push(url, key_file, ca_file, tokens))
    except TransportError as error:
        raise CommandError(str(error)) from None
    if pushed.refusals:
        listed = "; ".join(f"{name}: {why}" for name, why in list(pushed.refusals.items())[:5])
        raise CommandError(
            f"{url}: {len(pushed.refusals)} of {len(tokens)} accounts are not on every server ({listed}): run this again when "
            "all servers are up"
        )
    return pushed.servers

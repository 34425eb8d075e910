"""Clients of nats-py itself, as an attacker with a valid key has them; and what one may try with
them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nats

from shared.contracts import subjects
from shared.identity.permissions import node_role, swarm_node
from shared.roles import ROLES
from tests.secured_server import SecuredServer


async def raw(server: SecuredServer, key_file: Path, prefix: str, errors: list[str]) -> Any:
    """A client of nats-py itself, as an attacker with this key has it."""

    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    context = ssl.create_default_context(cafile=str(server.ca_file))
    return await nats.connect(server.url, **server.signing_in(key_file), tls=context, inbox_prefix=prefix, error_cb=on_error)


async def everything(operator: Any) -> dict[str, Any]:
    """Each stream's settings, fill and consumers, and the newest message of each forbidden subject
    is part of the fill.
    """
    found: dict[str, Any] = {}
    for stream in sorted((json.loads((await operator.request("$JS.API.STREAM.NAMES", b"{}")).data))["streams"]):
        info = json.loads((await operator.request(f"$JS.API.STREAM.INFO.{stream}", b"")).data)
        state = {key: info["state"][key] for key in ("messages", "first_seq", "last_seq", "bytes", "consumer_count")}
        consumers = json.loads((await operator.request(f"$JS.API.CONSUMER.NAMES.{stream}", b"{}")).data)["consumers"]
        found[stream] = (info["config"], state, consumers)
    return found


async def refused_of(client: Any, errors: list[str], wanted: Sequence[str], *, subscribe: bool) -> set[str]:
    """Which of the subjects the server does not let this client use."""
    errors.clear()
    for subject in wanted:
        if subscribe:
            await client.subscribe(subject)
        else:
            await client.publish(subject, b"", reply=client.new_inbox())
    await client.flush()
    await asyncio.sleep(0.2)
    kind = "subscription" if subscribe else "publish"
    return {subject for subject in wanted if any(f'{kind} to "{subject}"'.lower() in error.lower() for error in errors)}


def concrete(pattern: str) -> str:
    return pattern.replace("*", "some").replace(">", "more")


def everything_anybody_may_publish() -> list[str]:
    """One subject for each permission there is, of two nodes, and requests that nobody has."""
    patterns = [pattern for node in ("alpha", "beta") for pattern in swarm_node(node).publish]
    patterns += [pattern for node, role in itertools.product(("alpha", "beta"), ROLES) for pattern in node_role(node, role).publish]
    streams = [subjects.SWARM_ROLLOUTS, "KV_swarm_nodes", "KV_node_alpha", subjects.node_scored_stream("alpha")]
    verbs = ["STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.GET", "STREAM.MSG.DELETE"]
    verbs += ["STREAM.SNAPSHOT", "STREAM.RESTORE"]
    patterns += [f"$JS.API.{verb}.{stream}" for verb, stream in itertools.product(verbs, streams)]
    patterns += [f"$JS.API.CONSUMER.CREATE.{stream}.spy" for stream in streams]
    patterns += ["$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$SYS.REQ.SERVER.PING", "anything", "_INBOX.x"]
    return sorted({concrete(pattern) for pattern in patterns})

"""What a server says in an error stays one line of it, so that no server can write lines of its own
into a terminal or a log.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shared.transport.base import Transport, TransportError
from shared.transport.connect import connect
from shared.transport.nats.answers import SAID_CHARACTERS
from tests.integration.running_verifier import MakeServer
from tests.integration.test_unreadable_answers import answering

ROOT = Path(__file__).parents[2]
FORGED = "no\r\nswarm: alpha is banned\x1b[2J\u202e"
SHOWN = "no\\r\\nswarm: alpha is banned\\x1b[2J\\u202e"
REFUSAL = json.dumps({"error": {"code": 400, "err_code": 1, "description": FORGED}}).encode()
ENDLESS = json.dumps({"error": {"code": 400, "err_code": 1, "description": "x" * 100_000}}).encode()
REQUESTS: dict[str, Callable[[Transport], Awaitable[object]]] = {
    "state": lambda hub: hub.stream_state("S"),
    "publish": lambda hub: hub.publish("s", b"x", stream="S", message_id="1", timeout_s=5.0),
    "buckets": lambda hub: hub.kv.buckets(),
}


async def refusal(url: str, ask: Callable[[Transport], Awaitable[object]]) -> str:
    hub = await connect(url, name="test")
    try:
        with pytest.raises(TransportError) as told:
            async with asyncio.timeout(120):
                await ask(hub)
        return str(told.value)
    finally:
        await hub.close()


@pytest.mark.parametrize("request_", REQUESTS)
async def test_a_refusal_is_told_in_one_line_of_bounded_length(nats_server: MakeServer, request_: str) -> None:
    url = nats_server(jetstream=None).url
    async with answering(url, REFUSAL):
        told = await refusal(url, REQUESTS[request_])
    assert SHOWN in told and told.isprintable()
    async with answering(url, ENDLESS):
        told = await refusal(url, REQUESTS[request_])
    assert "xxx" in told and len(told) < SAID_CHARACTERS + 200


async def test_the_status_of_a_direct_get_is_told_in_one_line(nats_server: MakeServer) -> None:
    """nats-py's parser takes no line break into a header, but all else."""
    url = nats_server(jetstream=None).url
    async with answering(url, {"Status": "499\x1b[2J", "Description": "no\x85swarm: alpha is banned\u2028" + "x" * 10_000}):
        told = await refusal(url, lambda hub: hub.read("S", 1, 10))
    assert "499\\x1b[2J no\\x85swarm: alpha is banned\\u2028xxx" in told and told.isprintable()
    assert len(told) < SAID_CHARACTERS + 200


@pytest.mark.slow
async def test_a_command_prints_a_forged_line_within_its_own(nats_server: MakeServer) -> None:
    url = nats_server(jetstream=None).url
    async with answering(url, REFUSAL):
        status = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "swarm_cli", "status", "--node-url", url),
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "200"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(180):
            out, err = (each.decode() for each in await status.communicate())
    assert status.returncode == 1, err
    lines = [line for line in (out + err).splitlines() if "alpha is banned" in line]
    assert lines and not any(line.startswith("swarm: alpha") for line in lines), err
    assert any(SHOWN in line for line in lines)

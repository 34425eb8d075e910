"""A server that is told its configuration anew: a key taken out, and accounts that are missing."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import structlog

from shared.contracts import subjects
from shared.identity.keys import SigningKey, new_seed
from shared.runtime.logs import configure_logging
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.transport.base import AccessDenied, NotConnected
from shared.transport.connect import connect
from tests.integration.running_verifier import until
from tests.secured_server import SecuredServer, swarm


async def test_a_user_whose_key_is_taken_out_is_disconnected_and_says_so_until_it_is_back(tmp_path: Path):
    server = SecuredServer(tmp_path, ["alpha", "beta"])
    server.start()
    config = server.config("alpha", tmp_path)
    await asyncio.to_thread(server.init, "node", config)
    plane = await connect_node_plane(config, "trainer")
    whole = server._text
    try:
        await plane.kv.put("node_alpha", subjects.TRAINER_KEY, b"1")
        server._text = whole.replace(SigningKey((server.keys / "alpha/trainer.nk").read_bytes().strip()).public_key, stranger())
        server.configure()
        server.reload()
        await until(lambda: not plane.connected, 120)
        with pytest.raises(NotConnected):
            await plane.kv.put("node_alpha", subjects.TRAINER_KEY, b"2")
        server._text = whole
        server.configure()
        server.reload()
        await until(lambda: plane.connected, 120)
        assert await plane.kv.put("node_alpha", subjects.TRAINER_KEY, b"3") > 0
    finally:
        await plane.close()
        server.stop()


async def test_a_reload_without_the_accounts_is_refused_and_nobody_is_let_in(tmp_path: Path):
    server = SecuredServer(tmp_path, ["alpha"])
    server.start()
    whole = server._text
    try:
        server._text = whole[: whole.index("accounts {")] + whole[whole.index("max_connections: ") :]
        server.configure()
        server.reload()
        await until(lambda: "Failed to reload" in server.log_file.read_text(), 120)
        with pytest.raises(AccessDenied, match="wants a key and none is given"):
            await connect(server.url, name="x", timeout_s=20.0, ca_file=str(server.ca_file))
    finally:
        server.stop()


def stranger() -> str:
    return SigningKey(new_seed()).public_key


async def test_a_node_that_is_added_by_two_reloads_shares_and_nobody_else_notices(tmp_path: Path):
    """nats-server 2.15.1 gives an account that is new its imports at the second reload only; those
    that were there keep theirs.
    """
    server = SecuredServer(tmp_path, ["alpha", "beta"])
    whole = server._text
    alone = ("--nodes", "alpha", "--plane", "both", "--folder", str(server.keys))
    certificate = ("--tls-cert", str(tmp_path / "tls" / "server.pem"), "--tls-key", str(tmp_path / "tls" / "server.key"))
    server._text = swarm("nats", "config", *alone, *certificate, "--sync-interval", "1m")
    server.configure()
    server.start()
    try:
        await asyncio.to_thread(server.init, "swarm", server.config("alpha", tmp_path))
        alpha = await connect_swarm_plane(server.config("alpha", tmp_path), "verifier", timeout_s=10.0)
        server._text = whole
        server.configure()
        for number in (1, 2):
            server.reload()
            await until(lambda number=number: server.log_file.read_text().count("Reloaded server configuration") == number, 120)
        beta = await connect_swarm_plane(server.config("beta", tmp_path), "verifier", timeout_s=10.0)
        for plane, node in ((alpha, "alpha"), (beta, "beta")):
            subject = subjects.rollouts(node)
            await plane.publish(subject, b"shared", stream=subjects.SWARM_ROLLOUTS, message_id=node, timeout_s=20.0)
            await plane.close()
    finally:
        server.stop()


async def test_a_key_that_is_replaced_under_a_running_service_is_named_once_with_the_remedy(tmp_path: Path):
    server = SecuredServer(tmp_path, ["alpha"])
    server.start()
    file = tmp_path / "trainer.log"
    before = logging.getLogger().handlers, logging.getLogger().level, structlog.get_config()
    config = server.config("alpha", tmp_path)
    whole = server._text
    try:
        await asyncio.to_thread(server.init, "node", config)
        configure_logging(level="warning", log_format="json", file=file, stream=io.StringIO())
        plane = await connect_node_plane(config, "trainer")
        key = server.keys / "alpha/trainer.nk"
        server._text = whole.replace(SigningKey(key.read_bytes().strip()).public_key, stranger())
        server.configure()
        server.reload()
        refused = "authentication error"
        await until(lambda: server.log_file.read_text().count(refused) >= 3, 120)
        server._text = whole
        server.configure()
        server.reload()
        await until(lambda: plane.connected, 120)
        await plane.close()
    finally:
        logging.getLogger().handlers = before[0]
        logging.getLogger().setLevel(before[1])
        structlog.configure(**before[2])
        server.stop()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = [line for line in lines if line["event"] == "key_refused"]
    assert len(told) == 1 and told[0]["key_file"] == str(key) and "restart this service with the new key" in told[0]["remedy"]
    assert not [line for line in lines if "eof_received" in line["event"]]


async def test_a_service_that_starts_before_its_key_is_listed_says_so_waits_and_begins_when_it_is(tmp_path: Path):
    server = SecuredServer(tmp_path, ["alpha"])
    whole = server._text
    server._text = whole.replace(SigningKey((server.keys / "alpha/sampler.nk").read_bytes().strip()).public_key, stranger())
    server.configure()
    server.start()
    log_file = tmp_path / "sampler.log"
    settings = {
        "SWARM_NODE__ID": "alpha",
        "SWARM_NODE__VAR_DIR": str(tmp_path),
        "SWARM_HTTP__BASE_PORT": "0",
        "SWARM_LOG__FORMAT": "json",
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__NODE_CA_FILE": str(server.ca_file),
        "SWARM_NATS__NODE_KEY_FILE": str(server.keys / "alpha" / "{role}.nk"),
        "SWARM_NATS__CREATE_STREAMS": "false",
        "SWARM_TASKS": '[{"dataset": "gcd"}]',
    }
    await asyncio.to_thread(server.init, "node", server.config("alpha", tmp_path))
    with log_file.open("wb") as said:
        command = (sys.executable, "-m", "services.sampler")
        sampler = await asyncio.create_subprocess_exec(*command, stdout=said, stderr=said, env=os.environ | settings)
    try:
        await until(lambda: "key_refused_at_start" in log_file.read_text())
        assert "sampler.nk" in log_file.read_text() and "swarm nats config" in log_file.read_text()
        server._text = whole
        server.configure()
        server.reload()
        await until(lambda: '"started"' in log_file.read_text(), 60)
    finally:
        if sampler.returncode is None:
            sampler.terminate()
        code = await asyncio.wait_for(sampler.wait(), 60)
        server.stop()
    assert code == 0 and log_file.read_text().count("key_refused_at_start") == 1

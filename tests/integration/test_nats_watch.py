"""`swarm nats watch` against real servers: silent while everybody does their work, and loud where a
reply became a request.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import pytest

from shared.contracts import subjects
from shared.contracts.streams import prepare_node_streams
from shared.identity.keys import SigningKey
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from swarm_cli.server_diagnosis import answer
from tests.integration.nats_users import raw
from tests.nats_server import NatsServer, free_port
from tests.secured_server import SecuredServer, swarm

DEADLINE_S = 180.0


class Watching:
    """`swarm nats watch` as a process: what it exports and what it logs."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self.log = log

    def figure(self, name: str) -> float:
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10).read().decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def by(self, verdict: str) -> float:
        return self.figure(f'swarm_nats_api_requests_total{{by="{verdict}"}}')

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                if condition():
                    return
            except OSError:
                pass
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)


@contextmanager
def watching(folder: Path, url: str, key: Path, *more: str) -> Iterator[Watching]:
    port, log = free_port(), folder / "watch.log"
    command = [sys.executable, "-m", "swarm_cli", "nats", "watch", "--url", url, "--key", str(key), "--port", str(port), *more]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    watch = Watching(port, log)
    try:
        watch.until(lambda: watch.figure("swarm_nats_watch_listening") == 1)
        yield watch
    finally:
        process.terminate()
        assert process.wait(DEADLINE_S) == 0, log.read_text()


@pytest.mark.parametrize("accounts", ["text", "claims"])
async def test_the_watch_counts_the_work_of_roles_and_operators_and_calls_none_of_it_unexpected(tmp_path: Path, accounts: str):
    server = SecuredServer(tmp_path, ["alpha"], accounts=accounts)
    server.start()
    config = server.config("alpha", tmp_path)
    try:
        with watching(tmp_path, server.url, server.keys / "operator" / "watch.nk", "--ca", str(server.ca_file)) as watch:
            for plane in ("node", "swarm"):
                await asyncio.to_thread(server.init, plane, config)
            sampler = await connect_node_plane(config, "sampler")
            border = await connect_swarm_plane(config, "verifier", timeout_s=10.0)
            await prepare_node_streams(sampler, "alpha", create=False)
            await sampler.purge(subjects.node_scored_stream("alpha"), 1)
            assert await border.read(subjects.SWARM_ROLLOUTS, 1, 1) == []
            await asyncio.to_thread(
                watch.until, lambda: watch.by("usual") >= 1 and watch.by("operator") >= 9 and watch.by("looked") >= 5
            )
            await asyncio.sleep(0.5)
            assert watch.by("unexpected") == 0, watch.log.read_text()
            assert "nats_operator_request" in watch.log.read_text()
            await sampler.close()
            await border.close()
            # A new server process, and the watch listens again.
            server.restart()
            await asyncio.to_thread(watch.until, lambda: watch.figure("swarm_nats_watch_listening") == 1)
    finally:
        server.stop()


async def test_the_key_of_the_watch_can_do_nothing_but_listen(tmp_path: Path):
    server = SecuredServer(tmp_path, ["alpha"])
    server.start()
    await asyncio.to_thread(server.init, "node", server.config("alpha", tmp_path))
    errors: list[str] = []
    client = await raw(server, server.keys / "operator" / "watch.nk", "_INBOX_watch", errors)
    try:
        for subject in ("$JS.API.STREAM.NAMES", "NODE_ALPHA.$JS.EVENT.ADVISORY.API", "node.alpha.rollouts", "anything"):
            await client.publish(subject, b"")
        await client.subscribe(">")
        await client.flush()
        await asyncio.sleep(0.3)
        assert len([error for error in errors if "violation" in error.lower()]) == 5, errors
    finally:
        await client.close()
        server.stop()


@pytest.mark.parametrize("request_subject", ["$JS.API.STREAM.PURGE.NODE_ALPHA_BATCHES", "$JS.API.STREAM.DELETE.NODE_ALPHA_BATCHES"])
async def test_where_a_reply_becomes_a_request_the_watch_says_so(tmp_path: Path, request_subject: str):
    """On a server as it was configured before users had accounts of their own: a reply reaches
    JetStream there.
    """
    swarm("nats", "keys", "operator", "--folder", str(tmp_path / "keys"))
    key = tmp_path / "keys" / "operator" / "watch.nk"
    advisory = "$JS.EVENT.ADVISORY.API"
    monitor = free_port()
    config = f"""
    http: "127.0.0.1:{monitor}"
    accounts {{
      NODE_ALPHA {{
        jetstream: enabled
        users: [{{ user: operator, password: operator }}, {{ user: generator, password: generator }}]
        exports: [{{ stream: "{advisory}" }}]
      }}
      WATCH {{
        users: [{{ nkey: {SigningKey(key.read_bytes().strip()).public_key} }}]
        imports: [{{ stream: {{ account: NODE_ALPHA, subject: "{advisory}" }}, prefix: "NODE_ALPHA" }}]
      }}
    }}
    """
    server = NatsServer(tmp_path / "server", config=config).start()
    try:
        with watching(tmp_path, server.url, key) as watch:
            operator = await nats.connect(server.url, user="operator", password="operator")
            generator = await nats.connect(server.url, user="generator", password="generator")
            for name, subject in (("ROLLOUTS", "node.alpha.rollouts"), ("BATCHES", "node.alpha.batches")):
                stream = {"name": f"NODE_ALPHA_{name}", "subjects": [subject], "allow_direct": True}
                await operator.request(f"$JS.API.STREAM.CREATE.NODE_ALPHA_{name}", json.dumps(stream).encode())
            await generator.request("node.alpha.rollouts", b"")
            await asyncio.to_thread(watch.until, lambda: watch.by("operator") == 2)
            logged = server.log_file.read_text().count("\n")
            await generator.publish("$JS.API.DIRECT.GET.NODE_ALPHA_ROLLOUTS", b'{"seq": 1}', reply=request_subject)
            await asyncio.to_thread(watch.until, lambda: watch.by("unexpected") == 1)
            assert request_subject in watch.log.read_text()
            # Nothing else tells: the server counts a request like any other, and logs none.
            page = await asyncio.to_thread(answer, f"http://127.0.0.1:{monitor}", "jsz", 10.0)
            assert page["api"]["errors"] == 0 and request_subject not in json.dumps(page)
            assert server.log_file.read_text().count("\n") == logged
            await operator.close()
            await generator.close()
    finally:
        server.stop()

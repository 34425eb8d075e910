"""A server that comes back with an empty store, met by running processes and by new ones."""

from __future__ import annotations

import asyncio
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts.streams import ensure_node_streams, missing, names_of, noted_names
from shared.contracts.subjects import node_batches, node_batches_stream, node_policies_stream
from shared.transport.connect import connect
from tests.e2e.processes import REPO, ROLES, NodeProcesses, wait_until
from tests.integration.nats_backups import swarm
from tests.nats_server import NatsServer

START_S = 120.0
TOLD_S = 60.0
BATCHES = node_batches_stream("alpha")

pytestmark = pytest.mark.slow


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[NodeProcesses, NatsServer]]:
    """A sampler that runs, and its server."""
    server = NatsServer(tmp_path / "nats").start()
    settings = {
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__SWARM_URL": "none",
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
    }
    config = tmp_path / "node.toml"
    config.write_text('[sampler]\nexternal = 0\n[[tasks]]\ndataset = "leg_counting"\n')
    processes = NodeProcesses("alpha", "lost", tmp_path / "var", settings, config).start("sampler")
    try:
        wait_until(lambda: readiness(processes) == (200, "ok"), processes, timeout_s=START_S, what="the sampler is ready")
        yield processes, server
    finally:
        processes.kill_all()
        server.kill()


def readiness(processes: NodeProcesses) -> tuple[int, str]:
    """Return what `/readyz` answers: status and text; (0, "") before it is there."""
    started = processes.events("sampler", "started")
    if not started:
        return 0, ""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{started[-1]['http_port']}/readyz", timeout=10) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


def come_back_empty(server: NatsServer) -> None:
    server.kill()
    shutil.rmtree(server.folder / "store")
    server.start()


async def last_seq(url: str) -> int:
    transport = await connect(url, name="test")
    try:
        return (await transport.stream_state(BATCHES)).last_seq
    finally:
        await transport.close()


def test_a_running_process_says_that_its_streams_are_gone_is_not_ready_and_makes_none(
    node: tuple[NodeProcesses, NatsServer],
) -> None:
    processes, server = node
    come_back_empty(server)
    wait_until(lambda: BATCHES in readiness(processes)[1], processes, timeout_s=TOLD_S, what="it is told which")
    assert readiness(processes)[0] == 503
    wait_until(lambda: processes.events("sampler", "streams_lost"), processes, timeout_s=TOLD_S, what="the log says so")

    code, said = swarm("report", url=server.url)
    assert code == 1 and all(name in said for name in names_of("alpha")), "whoever asks the server is told as well"
    assert f'swarm_nats_streams_lost{{plane="node"}} {len(names_of("alpha"))}.0' in processes.metrics("sampler")
    assert len(processes.events("sampler", "streams_lost")) == 1

    again = NodeProcesses("alpha", "lost", processes.run_dir.parents[2], processes._environment, processes._config)
    again.start("verifier")
    assert again.processes["verifier"].wait(START_S) == 78, "one that starts now does not make them either"
    assert BATCHES in again.events("verifier", "cannot_go_on")[-1]["reason"]


def test_a_restore_puts_back_what_the_report_misses(node: tuple[NodeProcesses, NatsServer], tmp_path: Path) -> None:
    processes, server = node

    async def store_one() -> None:
        transport = await connect(server.url, name="test")
        await transport.publish(node_batches("alpha"), b"batch", stream=BATCHES, message_id="1")
        await transport.close()

    processes.stop("sampler")
    asyncio.run(store_one())
    assert swarm("backup", "--out", str(tmp_path / "backup"), url=server.url)[0] == 0
    processes.start("sampler")  # it cannot read that batch, and ends: only the store matters here
    code = processes.processes["sampler"].wait(START_S)
    assert code == 78
    come_back_empty(server)
    assert noted_names(processes.run_dir) == names_of("alpha")
    assert swarm("restore", str(tmp_path / "backup"), url=server.url)[0] == 0
    assert asyncio.run(last_seq(server.url)) == 1
    assert swarm("report", url=server.url)[0] == 0


def test_a_running_process_ends_when_other_streams_have_taken_the_place_of_its_own(
    node: tuple[NodeProcesses, NatsServer],
) -> None:
    processes, server = node
    come_back_empty(server)

    async def init() -> None:
        transport = await connect(server.url, name="operator")
        await ensure_node_streams(transport, "alpha")
        await transport.close()

    asyncio.run(init())
    assert processes.processes["sampler"].wait(TOLD_S) == 1, "so that its supervisor starts it again"
    (told,) = processes.events("sampler", "streams_replaced")
    assert BATCHES in told["streams"]


def test_a_store_that_is_back_as_it_was_lets_a_process_go_on(node: tuple[NodeProcesses, NatsServer], tmp_path: Path) -> None:
    processes, server = node
    server.kill()
    shutil.move(server.folder / "store", tmp_path / "unmounted")
    server.start()
    wait_until(lambda: readiness(processes)[0] == 503, processes, timeout_s=TOLD_S, what="it is told")
    wait_until(lambda: processes.events("sampler", "streams_lost"), processes, timeout_s=TOLD_S, what="and why")
    server.kill()
    shutil.rmtree(server.folder / "store")
    shutil.move(tmp_path / "unmounted", server.folder / "store")
    server.start()
    wait_until(lambda: readiness(processes) == (200, "ok"), processes, timeout_s=TOLD_S, what="it goes on")
    assert processes.events("sampler", "streams_back")


def test_one_stream_that_somebody_deleted_is_told_by_the_process_and_by_the_report(
    node: tuple[NodeProcesses, NatsServer],
) -> None:
    processes, server = node

    async def delete() -> None:
        from shared.transport.base import Deadline
        from shared.transport.nats.jetstream_api import call
        from shared.transport.nats.transport import connection_of

        transport = await connect(server.url, name="somebody")
        await call(connection_of(transport), f"STREAM.DELETE.{BATCHES}", None, Deadline(10), "delete")
        await transport.close()

    asyncio.run(delete())
    code, said = swarm("report", url=server.url)
    assert code == 1 and BATCHES in said
    server.restart()  # a reconnection makes every process look at once; without one it takes some minutes
    wait_until(lambda: BATCHES in readiness(processes)[1], processes, timeout_s=TOLD_S, what="told")


WHOLE = """
[model]
threads = 1
[generator]
completions = 2
groups_per_call = 2
max_new_tokens = 4
[eval]
tasks = 8
[sampler]
local = 1
external = 0
[trainer]
checkpoint_every = 2
[[tasks]]
dataset = "chain_sum"
"""


def test_no_process_of_a_node_that_trains_makes_its_streams_again(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats").start()
    settings = {
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__SWARM_URL": server.url,
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
    }
    config = tmp_path / "node.toml"
    config.write_text(WHOLE)
    alpha = NodeProcesses("alpha", "whole", tmp_path / "var", settings, config).start()
    try:
        wait_until(lambda: len(alpha.steps()) >= 3, alpha, timeout_s=START_S, what="it trains")
        come_back_empty(server)
        for role in ROLES:
            wait_until(lambda role=role: alpha.events(role, "streams_lost"), alpha, timeout_s=TOLD_S, what=role)  # type: ignore[misc]

        def stands_still() -> bool:
            steps = len(alpha.steps())
            time.sleep(10)
            return len(alpha.steps()) == steps

        # It may still train on the batches that it had read by then.
        wait_until(stands_still, alpha, timeout_s=TOLD_S + 60, what="it takes no further step")
        alpha.check_alive()

        async def left() -> list[str]:
            transport = await connect(server.url, name="test")
            try:
                names = [*names_of("alpha"), node_policies_stream("alpha")]
                return sorted(set(names) - set(await missing(transport, names)))
            finally:
                await transport.close()

        assert asyncio.run(left()) == [], "nothing of the node was made again"
        for role in ROLES:
            assert alpha.stop(role, TOLD_S) == 0, "it can still be stopped"
    finally:
        alpha.kill_all()
        server.kill()

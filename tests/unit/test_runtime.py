"""Start-up, restart and health of a service process."""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request

import pytest
import structlog
from prometheus_client import CollectorRegistry, Counter

from shared.cancelling import run_until_stopped
from shared.runtime import FatalError
from shared.runtime.health import HealthServer, Heartbeat, until_listening


def test_loops_end_together_when_one_fails() -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("endless")

    async def failing() -> None:
        await asyncio.sleep(0.01)
        raise FatalError("no")

    with pytest.raises(FatalError):
        asyncio.run(run_until_stopped(asyncio.Event(), endless(), failing()))
    assert ended == ["endless"]


def _status(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.slow
def test_health_port_says_alive_ready_and_counts() -> None:
    registry = CollectorRegistry()
    Counter("swarm_things", "Things.", registry=registry).inc(3)
    problem: list[str | None] = ["setting up"]
    server = HealthServer("127.0.0.1", 0, registry, Heartbeat(), lambda: problem[0])
    try:
        assert _status(server.port, "/livez") == (200, "ok\n")
        assert _status(server.port, "/readyz") == (503, "setting up\n")
        problem[0] = None
        assert _status(server.port, "/readyz") == (200, "ok\n")
        assert "swarm_things_total 3.0" in _status(server.port, "/metrics")[1]
        assert _status(server.port, "/elsewhere")[0] == 404
    finally:
        server.close()


def listening(port: int) -> HealthServer:
    return HealthServer("127.0.0.1", port, CollectorRegistry(), Heartbeat(), lambda: None)


@pytest.mark.slow
async def test_a_port_that_is_taken_for_a_second_is_waited_for_and_one_that_stays_taken_is_named_with_who_has_it() -> None:
    first, stopping, log = listening(0), asyncio.Event(), structlog.get_logger("test")

    def listen() -> HealthServer:
        return listening(first.port)

    with pytest.raises(FatalError) as refused:
        await until_listening(listen, "127.0.0.1", first.port, stopping, log, patience_s=0.2)
    for told in (f"127.0.0.1:{first.port}", f"process {os.getpid()} (", "http.base_port"):
        assert told in str(refused.value)
    waiting = asyncio.create_task(until_listening(listen, "127.0.0.1", first.port, stopping, log))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    first.close()
    second = await asyncio.wait_for(waiting, 20)
    assert second is not None and _status(second.port, "/readyz") == (200, "ok\n")
    third = asyncio.create_task(until_listening(lambda: listening(second.port), "127.0.0.1", second.port, stopping, log))
    await asyncio.sleep(0.1)
    stopping.set()
    assert await asyncio.wait_for(third, 20) is None, "who is asked to end need not wait for a port"
    second.close()

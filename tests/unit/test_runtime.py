"""Start-up, restart and health of a service process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import structlog
from prometheus_client import CollectorRegistry, Counter

from shared.cancelling import run_until_stopped
from shared.runtime import EXIT_CONFIG, FatalError
from shared.runtime.exits import MAX_CRASHES
from shared.runtime.health import HealthServer, Heartbeat, until_listening
from shared.runtime.supervise import RestartPolicy


def test_a_crash_is_followed_by_a_restart_and_a_final_exit_is_not() -> None:
    policy = RestartPolicy()
    assert policy.after_exit(-9, now_s=0.0) == 0.5
    assert policy.after_exit(0, now_s=1.0) is None
    assert policy.after_exit(EXIT_CONFIG, now_s=1.0) is None


def test_restarts_slow_down_and_end_when_crashes_come_too_fast() -> None:
    policy = RestartPolicy()
    delays = [policy.after_exit(1, now_s=float(second)) for second in range(MAX_CRASHES)]
    assert delays[:5] == [0.5, 1.0, 2.0, 5.0, 10.0]
    assert delays[-1] is None


def test_crashes_long_ago_are_forgotten() -> None:
    policy = RestartPolicy(max_crashes=2, window_s=10.0)
    assert policy.after_exit(1, now_s=0.0) == 0.5
    assert policy.after_exit(1, now_s=100.0) == 0.5


@pytest.mark.slow
def test_the_supervisor_starts_a_killed_child_again_and_passes_its_last_code_on(tmp_path: object) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        f"mark = pathlib.Path({str(tmp_path)!r}) / 'ran'\n"
        "if not mark.exists():\n"
        "    mark.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        f"sys.exit({EXIT_CONFIG})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "shared.runtime.supervise", "--", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == EXIT_CONFIG
    assert "was killed by SIGKILL: starting it again" in done.stderr


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

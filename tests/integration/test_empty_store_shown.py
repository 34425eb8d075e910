"""A server that came back with an empty store is told by every display, with what restores it, and
not taken for one on which nothing was started yet.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.config import load_config
from shared.contracts.streams import STREAMS_FILE, ensure_node_streams, names_of
from shared.transport.connect import connect
from swarm_cli.dashboard.swarm_source import SwarmSource
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.control import holding_run
from swarm_cli.observe.progress import ProgressView
from swarm_cli.runs import RunNote, StartOptions, write_note
from swarm_cli.target import default_target
from tests import forked
from tests.integration.local_swarm import START_TIMEOUT_S, Swarm, python_that_forks
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[2]
REMEDY = ("swarm nats restore", "docs/runbooks/SwarmStreamsLost.md")

pytestmark = pytest.mark.slow


@pytest.fixture
def emptied(tmp_path: Path, nats_server: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    """The server of a running run whose node has noted its streams; it has none of them."""
    for variable in ("SWARM_NODE__VAR_DIR", "SWARM_NATS__NODE_URL", "SWARM_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    server, run = nats_server(), tmp_path / "var" / "runs" / "one"
    with holding_run(run):
        write_note(run, RunNote(server.url, server.url, StartOptions()))
        (run / "alpha").mkdir()
        (run / "alpha" / STREAMS_FILE).write_text(json.dumps(names_of("alpha")))
        yield server


def told(*words: str) -> tuple[int, str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    done = forked.run("swarm_cli", words, environment=environment, cwd=Path.cwd(), timeout=240)
    return done.returncode, done.stdout, done.stderr


def test_status_and_top_say_that_the_store_is_empty_and_how_it_is_restored(emptied: NatsServer) -> None:
    for words in (["status"], ["top", "--once"], ["status", "alpha", "--node-url", emptied.url]):
        code, shown, error = told(*words)
        assert code == 1 and "swarm up`" not in shown + error, (words, shown, error)
        assert all(each in shown for each in (*REMEDY, "empty store", "alpha  ! lost: 6 of")), (words, shown, error)
    code, shown, _ = told("status", "--json")
    found = json.loads(shown)
    assert code == 1 and (found["nodes"]["alpha"]["kind"], found["nodes"]["alpha"]["lost_streams"]) == ("lost", names_of("alpha"))
    assert all(each in found["server_problem"] for each in REMEDY)


async def test_the_page_and_the_progress_view_say_it_too(emptied: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(DEMO_CONFIG, {"nats": {"node_url": emptied.url}, "node": {"run": "one"}})
    source = SwarmSource(config, default_target(config, emptied.url))
    assert await source.look() is not None
    answered = source.answer("/swarm.json", {})
    assert answered is not None
    state = json.loads(answered[1])
    assert (state["state"], [(node["node"], node["kind"]) for node in state["nodes"]]) == ("emptied", [("alpha", "lost")])
    assert all(each in state["problem"] for each in REMEDY)
    view = ProgressView(config, ["alpha"], 1, 1.0)
    nodes = await view._read(time.monotonic())
    assert nodes is not None and nodes[0].kind == "lost" and all(each in view._remedies(nodes)[0] for each in REMEDY)


async def test_nothing_is_said_of_a_server_that_has_the_streams(emptied: NatsServer) -> None:
    plane = await connect(emptied.url, name="test")
    await ensure_node_streams(plane, "alpha")
    await plane.close()
    config = load_config(DEMO_CONFIG, {"nats": {"node_url": emptied.url}, "node": {"run": "one"}})
    source = SwarmSource(config, default_target(config, emptied.url))
    seen = await source.look()
    assert seen is not None and seen.nodes[0].lost == ()
    answered = source.answer("/swarm.json", {})
    assert answered is not None and json.loads(answered[1])["state"] == "empty"


def test_the_server_that_swarm_up_started_and_whose_store_was_emptied_is_told(tmp_path: Path) -> None:
    with python_that_forks(tmp_path) as python:
        empty_the_store_of(Swarm(tmp_path, python, SWARM_SAMPLER__EXTERNAL="0"))


def empty_the_store_of(swarm: Swarm) -> None:
    """Start it, take its server's store away, and wait until that is told."""
    process, run = swarm.up("--nodes", "1"), swarm.node_dir("alpha").parent

    def until(found: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not found():
            assert process.poll() is None and time.monotonic() < give_up_at, what
            time.sleep(1.0)

    def problem() -> str:
        shown = swarm.call("status", "--json", "--node-url", f"nats://127.0.0.1:{swarm.nats_port}")
        return str(json.loads(shown.stdout)["server_problem"]) if shown.stdout else ""

    try:
        until(lambda: (run / "alpha" / "metrics.jsonl").is_file(), "it has taken a step")
        assert problem() == ""
        (note,) = run.glob("nats-server_*.ports")
        shutil.rmtree(run / "jetstream")
        os.kill(int(note.stem.removeprefix("nats-server_")), signal.SIGKILL)
        until(lambda: all(each in problem() for each in REMEDY), "the display says that the store is empty")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=180)

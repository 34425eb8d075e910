"""`swarm top` as a person runs it: against a real server, on a real (pseudo) terminal, and through
a pipe.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, ServiceStatus
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import sign_statement
from shared.transport.connect import connect
from swarm_cli.local.control import holding_run
from swarm_cli.runs import RunNote, StartOptions, write_end, write_note
from tests import forked
from tests.integration.page_swarm import PageSwarm
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    running = NatsServer(tmp_path / "nats").start()
    asyncio.run(_two_nodes_speak(running.url))
    yield running
    running.stop()


async def _two_nodes_speak(url: str) -> None:
    transport = await connect(url, name="test", timeout_s=10)
    await ensure_swarm_streams(transport)
    key = SigningKey(new_seed())
    for node in ("alpha", "beta"):
        await ensure_node_streams(transport, node)
        now = time.time()
        trainer = ServiceStatus(
            node=node, role="trainer", replica="0", pid=1, host="h", state="training", started_at=now - 60, updated_at=now,
            figures={"step": 41, "step_seconds": 0.5, "wait_share": 0.9, "forward_backward_share": 0.1},
        )  # fmt: skip
        await transport.kv.put(subjects.node_bucket(node), subjects.status_key("trainer", "0"), encode(trainer))
        for version, pass_rate in ((0, 0.125), (25, 0.625)):
            report = EvalReport(
                node=node, policy_version=version, created_at=now + version, n=8, pass_rate=pass_rate, mean_reward=0.5, per_task={},
                seconds=1,
            )  # fmt: skip
            payload = encode(sign_statement(report, key, "first")) if node == "alpha" else encode(report)
            await transport.publish(subjects.evals(node), payload, stream=subjects.SWARM_EVALS, message_id=f"{node}{version}")
    await transport.close()


def environment(columns: int = 80) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    return {**clean, "COLUMNS": str(columns), "LINES": "30", "TERM": "xterm-256color"}


def command(url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "swarm_cli", "top", "--node-url", url, *arguments]


def test_through_a_pipe_it_prints_one_look_and_ends_with_0(server: NatsServer) -> None:
    answer = subprocess.run(
        command(server.url),
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert answer.returncode == 0, answer.stderr
    assert "\x1b" not in answer.stdout, "control characters in a pipe"
    for words in ("alpha  ", "beta  ", "step 41  7,200 steps/h", "held-out 0.625 @25 base 0.125 +0.500  ▁█", "trainer training"):
        assert words in answer.stdout, answer.stdout
    assert "0.625 @25 unsigned base 0.125" in answer.stdout, "beta did not sign"
    assert answer.stdout.count("generator never seen") == 2
    only = subprocess.run(
        command(server.url, "beta", "--once"), cwd=ROOT, env=environment(160), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert only.returncode == 0 and "beta  " in only.stdout and "step 41" in only.stdout and "alpha" not in only.stdout


@pytest.mark.parametrize("word", ["top", "status"])
def test_a_node_elsewhere_is_shown_as_unknown_and_a_name_that_no_node_has_is_an_error(word: str, server: NatsServer) -> None:
    async def far() -> None:
        swarm = await PageSwarm.open(server.url)
        await swarm.node("gamma", here=False, step=9)
        await swarm.transport.close()

    asyncio.run(far())

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        asked = (word, "--node-url", server.url, *arguments)
        return forked.run("swarm_cli", asked, environment=environment(160), cwd=ROOT, timeout=DEADLINE_S)

    more = ["--once"] if word == "top" else []
    found = ask("gamma", *more)
    assert found.returncode == 0, found.stderr
    row = next(line for line in found.stdout.splitlines() if "gamma" in line)
    assert row.split()[:5] == ["gamma", "–", "–", "9", "–"] and "step" not in row
    if word == "status":
        told = json.loads(ask("--json").stdout)["nodes"]
        assert {name: (each["step"], each["finished"]) for name, each in told.items()} == {
            "alpha": (41, False),
            "beta": (41, False),
            "gamma": (None, None),
        }
        assert told["gamma"]["policy_version"] == 9 and told["gamma"]["trouble"] == []
    for names in (["gamna"], ["alpha", "zeta"]):
        refused = ask(*names, *more)
        assert refused.returncode == 1 and refused.stdout == "" and "Traceback" not in refused.stderr
        said = " ".join(refused.stderr.split())
        assert f"no node {names[-1]} on this server" in said and "the nodes there are alpha, beta, gamma" in said
    assert ask("zeta", *(more or ["--json"])).returncode == 1


def test_a_node_with_a_server_of_its_own_is_shown_without_a_word_of_sharing(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats").start()

    async def write(name: str) -> None:
        swarm = await PageSwarm.open(server.url)
        await swarm.node(name)
        await swarm.transport.close()

    def words(*options: str) -> set[str]:
        asked = ("top", "--once", "--node-url", server.url, *options)
        said = forked.run("swarm_cli", asked, environment=environment(160), cwd=ROOT, timeout=DEADLINE_S)
        assert said.returncode == 0 and "step 7" in said.stdout, said.stderr
        return {"taken", "SWARM_ROLLOUTS"} & set(said.stdout.split())

    try:
        asyncio.run(write("alpha"))
        assert words() == set()
        assert words("--swarm-url", server.url.replace("127.0.0.1", "localhost")), "another server may have others"
        asyncio.run(write("beta"))
        assert words("alpha") == {"taken", "SWARM_ROLLOUTS"}
    finally:
        server.stop()


def test_without_a_server_one_look_says_so_and_fails(tmp_path: Path) -> None:
    answer = subprocess.run(
        command("nats://127.0.0.1:9", "--once"), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert answer.returncode == 1
    assert "127.0.0.1:9" in answer.stderr and "Traceback" not in answer.stderr


@pytest.mark.parametrize("word", ["top", "status"])
def test_on_a_server_where_no_node_ever_was_none_is_shown(word: str, nats_server: Callable[..., NatsServer]) -> None:
    asked = (word, "--node-url", (url := nats_server().url), "--swarm-url", url)
    answer = forked.run("swarm_cli", asked, environment=environment(), cwd=ROOT, timeout=DEADLINE_S)
    assert answer.returncode == 1 and "alpha" not in answer.stdout, answer.stdout
    assert "no node has written to this server: if a swarm is starting there, wait for its services" in answer.stderr
    assert "otherwise start one (`swarm up`), or name its server" in answer.stderr


def test_on_a_terminal_it_says_that_no_node_is_there_yet(nats_server: Callable[..., NatsServer]) -> None:
    with Terminal(command(nats_server().url, "--every-s", "0.3")) as terminal:
        terminal.wait_for("no node has written to this server yet")
        assert "alpha" not in terminal.text
        os.write(terminal.master, b"q")
        assert terminal.process.wait(DEADLINE_S) == 0


def test_on_a_terminal_it_waits_for_no_name_that_no_node_has(server: NatsServer) -> None:
    with Terminal(command(server.url, "zeta", "--every-s", "0.3")) as terminal:
        terminal.wait_for("the nodes there are alpha, beta")
        assert terminal.process.wait(DEADLINE_S) == 1


def test_on_a_terminal_it_lives_through_a_server_that_goes_and_comes_and_q_ends_it(server: NatsServer) -> None:
    with Terminal(command(server.url, "--every-s", "0.3")) as terminal:
        terminal.wait_for("step 41")
        server.stop()
        terminal.wait_for("the server has not answered for")
        server.start()
        terminal.wait_for("nats://", after="not answered", without="Trying again")
        os.write(terminal.master, b"q")
        assert terminal.process.wait(10) == 0
        terminal.read(0.5)
    assert "\x1b[?1049h" in terminal.text and terminal.text.rstrip().endswith(("\x1b[?1049l\x1b[?25h", "\x1b[?25h\x1b[?1049l")), (
        "the alternate screen must be left and the cursor shown again"
    )


def test_told_of_no_server_it_ends_with_its_run_and_says_how_to_go_on(server: NatsServer, tmp_path: Path) -> None:
    folder = tmp_path / "var" / "runs" / "one"
    asked = [sys.executable, "-m", "swarm_cli", "top", "--every-s", "0.3"]
    with ExitStack() as stack:
        with holding_run(folder):
            write_note(folder, RunNote(server.url, server.url, StartOptions()))
            terminal = stack.enter_context(Terminal(asked, SWARM_NODE__VAR_DIR=str(tmp_path / "var")))
            terminal.wait_for("run one")
            terminal.wait_for("step 41")
            server.stop()
            write_end(folder, 0, "progress")
        assert terminal.process.wait(DEADLINE_S) == 3
        terminal.read(0.5)
    said = terminal.text.partition("\x1b[?1049l")[2]
    assert "run one ended in order at" in said and "`swarm top --run one` shows it" in said and "swarm up --run one" in said


_STYLES = re.compile(r"\x1b\[[\d;]*m")


class Terminal:
    """A program on a pseudo terminal, and all it has written there."""

    def __init__(self, arguments: list[str], **variables: str) -> None:
        self.master, self._slave = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=environment() | variables,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.master)
        os.close(self._slave)

    def read(self, seconds: float) -> str:
        """Return what is written from now on, for this long at most."""
        new, deadline = b"", time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0 and select.select([self.master], [], [], left_s)[0]:
            new += os.read(self.master, 65_536)
        self.text += new.decode("utf-8", "replace")
        return new.decode("utf-8", "replace")

    def wait_for(self, words: str, *, after: str = "", without: str = "") -> None:
        """Wait until a piece of output has `words` and not `without`."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            new = _STYLES.sub("", self.read(0.5))
            if words in new and not (without and without in new) and after in self.text:
                return
        pytest.fail(f"{words!r} was not shown within {DEADLINE_S:.0f} s:\n{self.text[-3000:]}")

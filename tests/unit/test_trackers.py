"""Numbers reach real trackers, nobody is called, and a tracker that fails or hangs costs training
nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from services.trainer.service import TrainerService
from services.trainer.tracking.base import Feed, Feeds, TrackedRun, chosen_trackers, open_feeds, tracking_problems
from shared import registry
from shared.config import ConfigError, NodeConfig, load_config
from shared.runtime import FatalError
from swarm_cli.config_commands import check
from swarm_cli.errors import CommandError
from tests import forked


class Counted:
    """A proxy that hears who calls, and hangs up. What asks for a path on this very server takes it
    for another that had its port before (another test's), and is not counted:
    a proxy is asked for an address, by CONNECT or by a whole URL.
    """

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                asked = connection.recv(4096).split(b"\r\n")[0]
                if not asked.partition(b" ")[2].startswith(b"/"):
                    self.asked.append(asked)


def wandb_rows(file: Path) -> list[dict[str, Any]]:
    """The history in a run file: LevelDB's log format with a header of 7 bytes, one block."""
    from wandb.proto import wandb_internal_pb2

    content, place, rows = file.read_bytes(), 7, []
    while place < len(content):
        size = int.from_bytes(content[place + 4 : place + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[place + 7 : place + 7 + size])
        place += 7 + size
        if record.WhichOneof("record_type") == "history":
            rows.append({(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item})
    return rows


@pytest.mark.slow
def test_real_trackers_get_every_step_and_call_nobody(tmp_path: Path) -> None:
    """The last call of the program is made on purpose: it shows that a call would be heard."""
    for package in ("wandb", "trackio", "tensorboard"):
        pytest.importorskip(package)
    heard = Counted()
    with socket.create_connection(("127.0.0.1", int(heard.url.rpartition(":")[2]))) as another:
        another.sendall(b"POST /v1/traces HTTP/1.1\r\n\r\n")
    proxied = {name: heard.url for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SWARM_", "WANDB_", "TRACKIO_"))}
    environment |= {**proxied, "NO_PROXY": "", "no_proxy": "", "HOME": str(tmp_path)}
    program = ("tests.unit.real_trackers", [str(tmp_path)])
    ended = forked.run(*program, environment=environment, cwd=Path.cwd(), timeout=120)
    assert ended.returncode == 0 and "tracker_failed" not in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    assert heard.asked == [b"CONNECT control.invalid:443 HTTP/1.0"] or heard.asked == [b"CONNECT control.invalid:443 HTTP/1.1"]

    run_dir = tmp_path / "runs/dev/alpha"
    (run_file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    rows = [(row["step"], row["train/loss"]) for row in wandb_rows(run_file)]
    assert rows == [(1, 0.125), (2, 0.25), (3, 0.375)]
    database = sqlite3.connect(tmp_path / "trackio/here.db")
    found = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step, json.loads(metrics)["train/loss"]) for name, step, metrics in found] == [
        ("dev-alpha", step, step / 8) for step in (1, 2, 3)
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.125), (2, 0.25), (3, 0.375)]


class Taken:
    """A tracker that keeps what it gets, or does what the test wants instead."""

    def __init__(self, instead: Any = None) -> None:
        self.steps: list[int] = []
        self.closed = False
        self._instead = instead

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if self._instead:
            self._instead()
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def raising(error: BaseException) -> Any:
    def instead() -> Any:
        raise error

    return instead


def test_what_was_offered_is_written_before_a_trainer_ends() -> None:
    tracker, said = Taken(), []
    feeds = Feeds([Feed("mine", lambda: tracker, lambda *what: said.append(what))])
    for step in range(1, 200):
        feeds.offer({"train/loss": 1.0}, step)
    feeds.close(10.0)
    assert tracker.steps == list(range(1, 200)) and tracker.closed and not said


def test_a_tracker_that_hangs_stops_nobody_and_is_told_once() -> None:
    forever, said = threading.Event(), []
    hanging = Feed("slow", lambda: Taken(forever.wait), lambda *what: said.append(what), capacity=8)
    other = Taken()
    feeds = Feeds([hanging, Feed("other", lambda: other, lambda *what: said.append(what))])
    started = time.monotonic()
    for step in range(1, 101):
        feeds.offer({"train/loss": 1.0}, step)
    feeds.close(0.5)
    assert time.monotonic() - started < 60
    assert said == [("slow", "is 8 steps behind, so that it misses some")]
    assert other.steps == list(range(1, 101))
    forever.set()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(1)], ids=["full disk", "exit"])
def test_a_tracker_that_fails_is_told_once_and_gets_the_next_steps(error: BaseException) -> None:
    said: list[tuple[str, str]] = []
    feeds = Feeds([Feed("broken", lambda: Taken(raising(error)), lambda *what: said.append(what))])
    for step in range(1, 20):
        feeds.offer({"train/loss": 1.0}, step)
    feeds.close(10.0)
    ((name, sentence),) = said
    assert name == "broken" and sentence.startswith(f"did not take step 1 ({type(error).__name__}: ")


def test_a_tracker_that_cannot_be_opened_is_told_once() -> None:
    said: list[tuple[str, str]] = []
    feeds = Feeds([Feed("none", raising(RuntimeError("no such account")), lambda *what: said.append(what))])
    feeds.close(10.0)
    for step in range(2 * 1024):
        feeds.offer({}, step)
    assert said == [("none", "cannot be opened (RuntimeError: no such account)")]


def configured(folder: Path, **tracking: Any) -> NodeConfig:
    return load_config(None, {"tasks": [{"dataset": "gcd"}], "node": {"var_dir": str(folder)}, "tracking": tracking})


def test_a_name_that_no_tracker_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tracker is called 'wandd': did you mean wandb\?"):
        configured(tmp_path, trackers=["wandd"])


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `swarm config check` and by the trainer. A folder called `wandb`, as W&B writes, is no
    package.
    """
    for name in ("wandb", "tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.path_importer_cache.clear()
    (tmp_path / "wandb").mkdir()
    config = configured(tmp_path, trackers=["wandb"])
    sentence = "tracking.trackers: wandb needs the package wandb, which is not installed: pip install 'swarm-rl[wandb]'"
    assert tracking_problems(config) == [sentence]
    assert chosen_trackers(configured(tmp_path)) == (), "auto takes what is there"
    with pytest.raises(FatalError, match=r"pip install 'swarm-rl\[wandb\]'"):
        TrainerService(config)


@pytest.mark.slow
def test_config_check_names_missing_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is here, so it is pretended that it is not."""
    monkeypatch.setitem(sys.modules, "trackio", None)
    file = tmp_path / "node.toml"
    asked = '[tracking]\ntrackers = ["trackio"]\n'
    file.write_text(f'[[tasks]]\ndataset = "gcd"\n{asked}')
    with pytest.raises(CommandError, match=r"trackio, which is not installed: pip install 'swarm-rl\[trackio\]'"):
        check(file)


def test_a_run_keeps_its_id_and_a_tracker_that_breaks_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[TrackedRun] = []

    def broken(run: TrackedRun) -> Taken:
        given.append(run)
        raise ConnectionError("no network")

    found = {"mine": [EntryPoint(name="mine", value=f"{__name__}:BROKEN", group="swarm.trackers")]}
    monkeypatch.setitem(registry.TRACKERS.__dict__, "installed", found)
    monkeypatch.setattr(sys.modules[__name__], "BROKEN", broken, raising=False)
    config = configured(tmp_path, trackers=["mine"], options={"colour": "red"})
    with capture_logs() as said:
        for step in (0, 7):
            open_feeds(config, step, structlog.get_logger()).close(10.0)
    first, second = given
    assert first.id == second.id and (first.step, second.step) == (0, 7) and first.options == {"colour": "red"}
    assert first.name == "dev-alpha" and not first.online and first.settings["trainer"]["objective"] == "dapo"
    assert {event["reason"] for event in said} == {"mine cannot be opened (ConnectionError: no network)"} and len(said) == 2
    text = json.dumps(first.settings)
    assert "nats://" not in text and "key" not in text

"""A process that dies again and again is told as such, with how often and what follows, instead of
as one that somebody must start.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console

from shared.config import load_config
from shared.roles import ROLES
from shared.runtime.exits import EXIT_CONFIG, KEPT, Deaths, deaths_file, note_death, read_deaths
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.control import holding_run
from swarm_cli.local.procfile import Layout
from swarm_cli.local.supervisor import Outcome
from swarm_cli.local.up import explain_end
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.remedies import advice, death_words
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.observe.status import show
from swarm_cli.runs import RunEnd
from tests.unit.supervised import end, noting, pids, supervised, until
from tests.unit.test_cli_standing import NOW, status, view

SUPERVISE = f"exec {sys.executable} -m shared.runtime.supervise -- sh -c"


def killed(times: int, *, every_s: float = 25.0, again_s: float | None = 10.0, code: int = -9) -> Deaths:
    """The deaths of a process that died `times` times, the last of them now."""
    return Deaths(tuple(NOW - every_s * ago for ago in reversed(range(times))), code, None if again_s is None else NOW + again_s)


def test_it_is_said_how_often_a_process_died_and_when_it_starts_again() -> None:
    assert death_words(killed(5), NOW, answers=False) == "killed 5 times in 100 s, starting again in 10 s"
    assert death_words(killed(5), NOW + 30, answers=False) == "killed 5 times in 100 s, started again 20s ago"
    assert death_words(killed(1), NOW, answers=False) == "killed once, starting again in 10 s"
    assert death_words(killed(4, code=1), NOW, answers=True) == "crashed 4 times in 75 s, starting again in 10 s"
    assert death_words(killed(8, every_s=10, again_s=None), NOW + 3600, answers=False) == "killed 8 times in 70 s, given up"
    assert death_words(killed(2), NOW, answers=True) == "", "it was killed by hand, perhaps, and is back"
    assert death_words(killed(5), NOW + 40, answers=True) == "killed 5 times in 100 s, started again 30s ago"
    assert death_words(killed(5), NOW + 80, answers=True) == "", "it has stayed for a while"
    assert death_words(killed(5), NOW + 121, answers=True) == "" == death_words(killed(5), NOW + 121, answers=False), "that is past"


def test_a_process_that_cannot_go_on_is_given_up_with_its_own_reason_and_not_started_again(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    (run / "alpha").mkdir(parents=True)
    file = deaths_file(run, "alpha-trainer")
    note_death(file, -9, 0.5)
    why = "metrics port 127.0.0.1:9403 cannot be opened, which process 7 (x) has: set http.base_port"
    note_death(file, EXIT_CONFIG, None, why)
    found = read_deaths(file)
    assert found is not None and (found.why, found.next_at) == (why, None)
    assert death_words(found, NOW, answers=False) == f"given up, it cannot go on: {why}"
    assert death_words(found, NOW, answers=True) == "", "somebody has started it again"
    assert death_words(replace(found, why=""), NOW, answers=False) == "given up, it cannot go on: its log says why"
    first, second = advice([view(trainer=status("trainer", age_s=100.0))], run)
    assert first == f"alpha-trainer: given up, it cannot go on: {why}" and "swarm restart alpha-trainer" in second


def test_the_page_says_at_a_start_that_a_process_was_given_up(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    (run / "alpha").mkdir(parents=True)
    note_death(deaths_file(run, "alpha-trainer"), EXIT_CONFIG, None, "no such model")
    young = [structs.replace(status(role), started_at=NOW - 20) for role in ROLES if role != "trainer"]
    starts = NodeState("alpha", tuple(young), at=NOW)
    with holding_run(run):
        seen = SwarmState(NOW, (starts,), (), True)
        state = swarm_object(seen, RecentGroups())
        assert (state["state"], state["nodes"][0]["kind"]) == ("starting", "starting")
        state = swarm_object(seen, RecentGroups(), run=run)
    (node,) = state["nodes"]
    assert (state["state"], node["kind"], [each["process"] for each in node["away"]]) == ("failed", "silent", ["alpha-trainer"])
    assert node["words"] == "trainer given up, it cannot go on: no such model"


@pytest.mark.slow
def test_a_service_notes_why_it_cannot_go_on_and_a_new_start_forgets_it(tmp_path: Path) -> None:
    file = deaths_file(tmp_path / "run", "alpha-sampler")
    file.parent.mkdir(parents=True)
    config = tmp_path / "swarm.toml"
    config.write_text('[[tasks]]\ndataset = "gcd"\n[http]\nhost = "192.0.2.1"\n')
    environment = os.environ | {"SUPERVISE_DEATHS": str(file), "SWARM_NODE__VAR_DIR": str(tmp_path / "var")}
    command = [sys.executable, "-m", "services.sampler", "--config", str(config)]
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    found = read_deaths(file)
    assert ended.returncode == EXIT_CONFIG and found is not None, ended.stdout
    assert found.next_at is None and "metrics port 192.0.2.1" in found.why
    up = supervised({"alpha-sampler": noting(tmp_path, "a")}, log_file=str(tmp_path / "run" / "up.log"))
    try:
        until(lambda: pids(tmp_path, "a"), "it runs")
        assert read_deaths(file) is None
    finally:
        end(up, *pids(tmp_path, "a"))


@pytest.mark.slow
def test_its_supervisors_note_each_death_and_a_full_disk_or_a_damaged_note_keeps_nothing_from_starting(tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = deaths_file(run, "alpha-trainer")
    assert file == run / "alpha" / "trainer.deaths.json"
    up = supervised({"alpha-trainer": f"{SUPERVISE} {shlex.quote(noting(tmp_path, 'a'))}"}, log_file=str(run / "up.log"))

    def kill(number: int) -> None:
        until(lambda: len(pids(tmp_path, "a")) == number, f"it is started {number} times")
        os.kill(pids(tmp_path, "a")[-1], signal.SIGKILL)
        until(lambda: (found := read_deaths(file)) and len(found.times) == number, f"death {number} is noted")

    try:
        kill(1)
        kill(2)
        found = read_deaths(file)
        assert found is not None and found.code == -9 and found.next_at is not None
        assert time.time() - 180 < found.times[0] <= found.times[1] < found.next_at
        file.write_text("[" * 4000)
        until(lambda: len(pids(tmp_path, "a")) == 3, "it is started for the third time")
        os.kill(pids(tmp_path, "a")[-1], signal.SIGKILL)
        until(lambda: read_deaths(file), "the note is whole again")
        until(lambda: len(pids(tmp_path, "a")) == 4, "it is started for the fourth time")
    finally:
        end(up, *pids(tmp_path, "a"))


def test_the_note_is_bounded(tmp_path: Path) -> None:
    file = deaths_file(tmp_path, "nats")
    for _ in range(2 * KEPT):
        note_death(file, 1, 10.0)
    found = read_deaths(file)
    assert found is not None and len(found.times) == KEPT and file.stat().st_size < 1000


def test_every_view_says_that_a_dying_process_is_being_started_and_none_that_somebody_must(tmp_path: Path) -> None:
    run = tmp_path / "var" / "runs" / "one"
    (run / "alpha").mkdir(parents=True)
    said = {"times": [NOW - 100, NOW - 50, NOW], "code": -9, "next_at": NOW + 10}
    deaths_file(run, "alpha-trainer").write_text(json.dumps(said))
    lost = view(trainer=status("trainer", age_s=40.0))
    snapshot = SwarmState(NOW, (lost,), (), True)
    words = "killed 3 times in 100 s, starting again in 10 s"
    assert advice([lost], run) == [f"alpha-trainer: {words}"]
    out = io.StringIO()
    with holding_run(run):
        show(snapshot, Console(file=out, width=200), run)
        assert f"alpha-trainer: {words}" in out.getvalue() and "swarm restart" not in out.getvalue()
        state = swarm_object(snapshot, RecentGroups(), run=run)
    (node,) = state["nodes"]
    assert node["kind"] == "silent" and f"trainer {words}" in node["words"]
    assert node["away"][0]["again"] == f"alpha-trainer: {words}"


def test_a_run_that_a_killed_process_ends_says_so_and_promises_no_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    explain_end(Outcome(137, "beta-trainer"), load_config(DEMO_CONFIG, {"node": {"run": "own"}}), Layout())
    said = capsys.readouterr().err
    assert RunEnd("failed", NOW, 137, "beta-trainer").cause == "beta-trainer was killed by SIGKILL 8 times in 120 s"
    assert RunEnd("failed", NOW, 1, "beta-trainer").cause == "beta-trainer ended with code 1"
    assert "beta-trainer was killed by SIGKILL 8 times in 120 s, so everything was stopped" in said, said
    assert "last lines" not in said and "beta/trainer.log" in said

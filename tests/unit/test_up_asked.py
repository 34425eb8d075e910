"""`swarm down` and `swarm restart` from another terminal, one `swarm up` a run, and what a lock
that is left behind means.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from swarm_cli.errors import CommandError
from swarm_cli.local.control import SOCKET, answering, ask, holding_run, named
from swarm_cli.local.supervisor import EndRun, RunRules, StartAgain, StayAway
from swarm_cli.runs import EXIT_KILLED, LOCK, holder
from swarm_cli.target import running_run
from tests import forked
from tests.unit.supervised import DEADLINE_S, ROOT, end, is_running, noting, pids, until

RUN = """
import json, sys
from pathlib import Path
from swarm_cli.local.control import ControlHandler
from swarm_cli.local.control import answering, holding_run
from swarm_cli.local.supervisor import run_lines
folder = Path(sys.argv[1])
with holding_run(folder):
    beside = lambda supervisor: answering(folder, ControlHandler(supervisor).answer)
    outcome = run_lines(json.loads(sys.argv[2]), {}, log_file=folder / "up.log", ends_by_steps=False, beside=beside)
sys.exit(outcome.code)
"""


@pytest.mark.parametrize("place", ["file", "/proc/none"])
def test_a_place_where_no_run_can_be_is_a_sentence_that_names_the_setting(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CommandError, match=r"cannot be made .*node\.var_dir"), holding_run(tmp_path / place / "runs" / "one"):
        pass


def started(folder: Path, lines: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder), json.dumps(lines)], cwd=ROOT, stdout=subprocess.DEVNULL)


def swarm(var_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    asked = (*arguments, "--var-dir", str(var_dir))
    return forked.run("swarm_cli", asked, environment=os.environ, cwd=ROOT, timeout=DEADLINE_S)


@pytest.mark.slow
def test_a_service_is_restarted_and_the_run_ended_from_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "var" / "runs" / ("long-" * 12)  # a socket's name has 108 characters at most
    lines = {"alpha-trainer": noting(tmp_path, "a"), "beta-trainer": noting(tmp_path, "b"), "alpha-sampler": noting(tmp_path, "s")}
    up = started(folder, lines)
    try:
        until(lambda: all(pids(tmp_path, name) for name in "abs") and (folder / SOCKET).exists(), "all start")
        one = swarm(tmp_path / "var", "restart", "alpha-trainer")
        assert one.returncode == 0 and f"was {pids(tmp_path, 'a')[0]}" in one.stderr, one.stderr
        until(lambda: len(pids(tmp_path, "a")) == 2, "it is started again")
        assert not is_running(pids(tmp_path, "a")[0]) and len(pids(tmp_path, "b")) == 1
        assert swarm(tmp_path / "var", "restart", "trainer").returncode == 0
        until(lambda: len(pids(tmp_path, "a")) == 3 and len(pids(tmp_path, "b")) == 2, "both trainers are started again")
        unknown = swarm(tmp_path / "var", "restart", "trainr")
        assert unknown.returncode == 1 and "name one of alpha-trainer" in unknown.stderr
        with pytest.raises(CommandError, match=f"is running already .process {up.pid}.*swarm down"), holding_run(folder):
            pass
        down = swarm(tmp_path / "var", "down")
        assert down.returncode == 0 and "has ended" in down.stderr
        assert up.wait(DEADLINE_S) == 0, "it ended as it was asked to"
        assert not any(is_running(pid) for name in "abs" for pid in pids(tmp_path, name))
        assert not (folder / SOCKET).exists()
        again = swarm(tmp_path / "var", "down")
        assert again.returncode == 1 and "no `swarm up` is running in" in again.stderr
    finally:
        end(up, *(pid for name in "abs" for pid in pids(tmp_path, name)))


@pytest.mark.slow
def test_down_says_at_once_and_every_ten_seconds_what_it_waits_for(tmp_path: Path) -> None:
    folder = tmp_path / "var" / "runs" / "one"
    late = noting(tmp_path, "a", "trap 'sleep 12; exit 0' TERM; while :; do sleep 0.1; done")
    up = started(folder, {"alpha-trainer": late, "alpha-sampler": noting(tmp_path, "s")})
    try:
        until(lambda: pids(tmp_path, "a") and (folder / SOCKET).exists(), "it starts")
        down = swarm(tmp_path / "var", "down")
        first, second, *_ = [line for line in down.stderr.splitlines() if "waiting for" in line]
        assert down.returncode == 0 and "alpha-trainer" in first and "alpha-sampler" in first
        assert "alpha-trainer" in second and "alpha-sampler" not in second and "for 10 s" in second
    finally:
        end(up, *(pid for name in "as" for pid in pids(tmp_path, name)))


@pytest.mark.slow
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_run_that_is_ended_now_is_killed_because_of_that_alone(tmp_path: Path, asked_before: bool) -> None:
    folder = tmp_path / "var" / "runs" / "one"
    up = started(folder, {"alpha-trainer": "trap '' TERM; " + noting(tmp_path, "a", "while :; do sleep 0.1; done")})
    try:
        until(lambda: pids(tmp_path, "a") and (folder / SOCKET).exists(), "it starts")
        if asked_before:
            ask(folder, {"do": "down"})
        assert swarm(tmp_path / "var", "down", "--now").returncode == 0
        # Asked before, it may have saved its state, which the run's records tell.
        assert up.wait(DEADLINE_S) == (0 if asked_before else EXIT_KILLED)
        log = (folder / "up.log").read_text()
        assert "alpha-trainer is killed: you asked for it (--now)" in log and "second time" not in log
    finally:
        end(up, *pids(tmp_path, "a"))


@pytest.mark.slow
def test_what_a_killed_swarm_up_leaves_behind_stands_in_nobodys_way(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    up = started(folder, {"alpha-trainer": noting(tmp_path, "a")})
    try:
        until(lambda: (folder / SOCKET).exists() and holder(folder) == up.pid, "it starts")
        up.kill()
        up.wait()
        assert (folder / LOCK).read_text() == str(up.pid) and (folder / SOCKET).exists()
        # A child that it was starting as it was killed has the lock until it becomes a service.
        until(lambda: holder(folder) is None, "nobody holds the run")
        again = started(folder, {"alpha-trainer": noting(tmp_path, "a")})
        until(lambda: holder(folder) == again.pid, "the next one holds the run")
        until(lambda: (folder / SOCKET).exists() and "processes" in asked_down(folder), "it can be asked")
        assert again.wait(DEADLINE_S) == 0
    finally:
        end(up, *pids(tmp_path, "a"))


def asked_down(folder: Path) -> dict[str, object]:
    try:
        return ask(folder, {"do": "down"})
    except CommandError:
        return {}


def test_a_number_in_the_file_of_a_process_that_is_another_by_now_holds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / LOCK).write_text(str(os.getpid()))
    assert holder(folder) is None
    with holding_run(folder):
        pass


def test_the_lock_is_its_owners_alone_also_where_an_older_one_was_not(tmp_path: Path) -> None:
    old = tmp_path / "runs" / "old"
    old.mkdir(parents=True)
    (old / LOCK).touch(mode=0o644)
    for folder in (old, tmp_path / "runs" / "new"):
        with holding_run(folder):
            assert (folder / LOCK).stat().st_mode & 0o777 == 0o600
            assert holder(folder) == os.getpid()


def test_no_process_is_named_that_does_not_hold_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with holding_run(folder):
        (folder / LOCK).write_text(str(os.getppid()))  # as where its number was given away again
        assert holder(folder) == 0
        with pytest.raises(CommandError, match="which process holds") as refused:
            ask(folder, {"do": "down"})
        assert "kill" not in str(refused.value)


@pytest.mark.parametrize("line", [b"[1]", b"7", b"{", b"[" * 60_000], ids=["list", "number", "cut", "deep"])
async def test_what_is_no_question_is_refused_with_a_sentence(tmp_path: Path, line: bytes) -> None:
    async def never(question: Mapping[str, object]) -> dict[str, object]:
        raise AssertionError(question)

    async with answering(tmp_path, never), asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET))
        writer.write(line + b"\n")
        assert "a request is one line with a JSON object" in json.loads(await reader.readline())["error"]
        writer.close()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists open files there")
def test_a_named_run_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"found-{os.getpid()}"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with holding_run(tmp_path / "a" / "runs" / name):
        assert running_run(name, None) == tmp_path / "a" / "runs" / name
        with pytest.raises(CommandError, match=f"run {name}   --var-dir {re.escape(str(tmp_path / 'a'))}"):
            running_run("", None)
        with pytest.raises(CommandError, match="is not running in"):
            running_run(name, tmp_path / "elsewhere")
        with holding_run(tmp_path / "b" / "runs" / name), pytest.raises(CommandError, match="(?s)choose one.*/a.*/b"):
            running_run(name, None)
    with pytest.raises(CommandError, match=f"run '{name}' is not running"):
        running_run(name, None)


def test_the_run_that_is_meant_is_found_or_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no `swarm up` is running in"):
        running_run("", tmp_path)
    with holding_run(tmp_path / "runs" / "one"):
        assert running_run("", tmp_path).name == "one"
        with pytest.raises(CommandError, match=f"run 'two' is not running in(?s:.*)run one   --var-dir {re.escape(str(tmp_path))}"):
            running_run("two", tmp_path)
        with holding_run(tmp_path / "runs" / "two"), pytest.raises(CommandError, match="name one of one, two"):
            running_run("", tmp_path)


def test_a_service_is_meant_by_its_name_or_by_its_role() -> None:
    states = dict.fromkeys(("nats", "alpha-trainer", "beta-trainer", "alpha-sampler", "progress"), "")
    assert named("nats", states) == ["nats"]
    assert named("trainer", states) == ["alpha-trainer", "beta-trainer"]
    with pytest.raises(CommandError, match="no process here is called 'gamma-trainer'"):
        named("gamma-trainer", states)


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ("alpha_trainer", "did you mean alpha-trainer? Or name one of nats, alpha-trainer, "),
        ("alfa-trainer", "did you mean alpha-trainer"),
        ("trainr", "did you mean trainer"),
        ("gone", "called 'gone': name one of nats, "),
        ("", "no service is named: name one of nats, alpha-trainer, beta-trainer, alpha-sampler, progress, or a role (generator, "),
    ],
)
def test_a_service_that_is_not_there_or_not_named_is_told_with_those_that_are(service: str, said: str) -> None:
    states = dict.fromkeys(("nats", "alpha-trainer", "beta-trainer", "alpha-sampler", "progress"), "")
    with pytest.raises(CommandError) as refused:
        named(service, states)
    assert said in str(refused.value)
    assert refused.value.exit_code == (1 if service else 2)


PROCESSES = frozenset({"nats", "progress", "alpha-trainer", "alpha-sampler", "beta-trainer"})


def test_a_service_that_cannot_go_on_ends_the_run_where_no_node_is_whole_or_steps_are_counted() -> None:
    rules = RunRules(ends_by_steps=False)
    assert rules.after_end("alpha-trainer", 78, 0.0, PROCESSES) == StayAway()
    assert rules.after_end("alpha-sampler", 78, 0.0, PROCESSES) == StayAway()
    assert rules.after_end("beta-trainer", 1, 0.0, PROCESSES) == EndRun(1)
    assert RunRules(ends_by_steps=True).after_end("alpha-trainer", 78, 0.0, PROCESSES) == EndRun(78)
    assert RunRules(ends_by_steps=False).after_end("nats", 1, 0.0, PROCESSES) == EndRun(1)


def test_one_that_a_person_started_again_is_whole_again() -> None:
    rules = RunRules(ends_by_steps=False)
    rules.after_end("alpha-trainer", 78, 0.0, PROCESSES)
    rules.started_again("alpha-trainer")
    assert rules.after_end("beta-trainer", 78, 1.0, PROCESSES) == StayAway()


def test_the_view_ends_a_run_only_when_it_has_seen_the_steps() -> None:
    assert RunRules(ends_by_steps=True).after_end("progress", 0, 0.0, PROCESSES) == EndRun(0)
    for ends_by_steps, code in ((True, 1), (True, 78), (True, -9), (False, 0)):
        assert isinstance(RunRules(ends_by_steps).after_end("progress", code, 0.0, PROCESSES), StartAgain)


def test_one_that_ends_again_and_again_is_started_later_each_time_until_it_has_run_for_a_while() -> None:
    rules = RunRules(ends_by_steps=False)
    delays = [rules.after_end("alpha-trainer", -9, float(second), PROCESSES) for second in range(6)]
    assert delays == [StartAgain(seconds) for seconds in (0.5, 1.0, 2.0, 5.0, 10.0, 10.0)]
    assert rules.after_end("alpha-trainer", -9, 1000.0, PROCESSES) == StartAgain(0.5)

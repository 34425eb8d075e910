"""A run that has ended is its records: every command shows it from them, without a server, changes
nothing of it, and keeps nobody from starting it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.trainer.records import trained_line
from shared.config import load_config
from shared.runtime.exits import EXIT_UNSAVED
from swarm_cli.app import build
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.control import holding_run
from swarm_cli.observe.snapshot import ended_run
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.runs import EXIT_BROKE_OFF, RunNote, StartOptions, read_end, write_end, write_note
from swarm_cli.target import looking_at
from tests.integration.page_swarm import SET, Dashboard, PageSwarm, group, trained_on, usual
from tests.nats_server import NatsServer


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are, with one that took its steps; its server has ended."""
    var_dir = tmp_path_factory.mktemp("var")
    folder = var_dir / "runs" / "first"
    server = NatsServer(var_dir / "nats").start()

    async def write() -> None:
        swarm = await PageSwarm.open(server.url, folder)
        await usual(swarm)
        for node in ("alpha", "beta"):
            await swarm.node(node, finished=True)
            evaluated(folder / node)
        await swarm.transport.close()

    asyncio.run(write())
    server.stop()
    shutil.rmtree(var_dir / "nats")
    write_note(folder, RunNote(server.url, server.url, StartOptions()))
    write_end(folder, 0, "progress")
    of_set = {
        "set": "late",
        "policy_version": 0,
        "n": 8,
        "pass_rate": 0.25,
        "k": 4,
        "questions": 2,
        "error": 0.1,
        "pass_at": {"4": 0.5},
    }
    (folder / "alpha" / "eval_sets.jsonl").write_text(json.dumps(of_set) + "\n")
    for node in ("alpha", "beta"):
        (folder / node / "trainer.log").touch()
        (folder / node / "checkpoints" / "step-00000006").mkdir(parents=True)
    return var_dir


@pytest.fixture
def var_dir(stored: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(stored))
    monkeypatch.setenv("COLUMNS", "160")
    before = digest(stored / "runs")
    yield stored
    assert digest(stored / "runs") == before, "the run is as it was"


def digest(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "up.lock")
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def swarm(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(build(arguments[0]), list(arguments))
    if isinstance(found.exception, CommandError):
        return found.exception.exit_code, found.stdout, str(found.exception)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


def test_status_says_how_the_run_ended_with_an_exit_code_of_its_own(var_dir: Path) -> None:
    code, out, err = swarm("status", "--run", "first")
    assert code == 3 and "run first ended in order at" in err and "every node has taken its steps" in err
    assert out.count("ended") == 2 * 4 and "silent" not in out and "0.750 @9" in out
    code, out, _ = swarm("status", "--run", "first", "--json")
    told = json.loads(out)
    assert code == 3 and told["ended"]["run"] == "first" and told["ended"]["how"] == "in order"
    alpha = told["nodes"]["alpha"]
    assert (alpha["finished"], alpha["trouble"], alpha["step"], alpha["policy_version"]) == (True, [], 6, 9)


def test_status_of_an_ended_run_has_the_results_on_evaluation_sets(var_dir: Path) -> None:
    _, out, _ = swarm("status", "--run", "first")
    assert "set late: avg@4 0.250" in out and out.count("set late") == 1, out


def test_status_that_finds_no_server_says_that_the_run_there_has_ended(var_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NATS__NODE_URL", noted_url(var_dir / "runs" / "first"))
    code, out, err = swarm("status")
    assert code == 3 and "run first ended in order at" in err and "`swarm status --run first` shows it" in err
    code, out, _ = swarm("status", "--json")
    assert code == 3 and json.loads(out[out.index("{") :])["ended"]["how"] == "in order"


def test_an_end_that_was_no_order_has_another_exit_code(var_dir: Path) -> None:
    end = var_dir / "runs" / "first" / "end.json"
    before = end.read_bytes()
    try:
        write_end(var_dir / "runs" / "first", 78, "alpha-trainer")
        code, _, err = swarm("status", "--run", "first")
        assert code == 4 and "run first failed at" in err and "alpha-trainer cannot go on" in err
        end.unlink()
        code, out, _ = swarm("status", "--json", "--run", "first")
        assert code == 4 and json.loads(out[out.index("{") :])["ended"]["how"] == "killed"
    finally:
        end.write_bytes(before)


def test_batches_and_groups_and_the_top_of_an_ended_run_are_read(var_dir: Path) -> None:
    code, out, err = swarm("rollouts", "alpha", "--run", "first", "--json", "--step", "1")
    groups = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "run first ended in order at" in err, err
    assert [group["question"] for group in groups][0] == "Find the greatest common divisor of 12 and 18."
    assert swarm("rollouts", "alpha", "--run", "first", "--follow")[0] == 0, "there is nothing to wait for"
    code, out, _ = swarm("rollouts", "alpha", "--group", groups[0]["group_id"][:12], "--run", "first")
    assert code == 0 and "alpha  in the batch of step 1: " in out.splitlines()[-1]
    code, out, err = swarm("top", "--once", "--run", "first")
    assert code == 0 and "run first ended in order at" in err and "ended" in out and "silent" not in out


def test_a_node_that_an_ended_run_does_not_have_is_refused_with_those_that_it_has(var_dir: Path) -> None:
    for more in ([], ["--json"], ["--refused"]):
        code, out, err = swarm("rollouts", "gamma", "--run", "first", *more)
        assert (code, out) == (1, "") and "run first has no records of gamma: it has those of alpha, beta" in err
    assert swarm("rollouts", "alhpa", "--run", "first")[2].endswith("did you mean alpha?")
    code, _, err = swarm("rollouts", "alpha", "--run", "first", "--dataset", "leg_countign")
    assert code == 1 and "no group of leg_countign is in the batches of alpha" in err


def test_steps_that_no_checkpoint_contains_are_told_by_every_display_of_an_ended_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "demo" / "alpha"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "trainer.log").touch()
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 13)))
    write_note(folder.parent, RunNote("nats://127.0.0.1:1", "nats://127.0.0.1:1", StartOptions()))
    write_end(folder.parent, EXIT_UNSAVED, "alpha-trainer")
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    end = read_end(folder.parent)
    assert end is not None
    for saved, told in ((0, "there is none"), (5, "the newest is of step 5"), (12, "")):
        (folder / "checkpoints" / f"step-{saved:08d}").mkdir(exist_ok=True)
        code, out, _ = swarm("status", "--run", "demo")
        assert code == EXIT_BROKE_OFF and ("the policy after step 12" in out) == bool(told) and told in out
        _, out, _ = swarm("status", "--run", "demo", "--json")
        assert bool(json.loads(out[out.index("{") :])["nodes"]["alpha"]["trouble"]) == bool(told)
        _, out, _ = swarm("top", "--once", "--run", "demo")
        assert told in out
        (node,) = swarm_object(ended_run(folder.parent, end), RecentGroups(), ended=True)["nodes"]
        assert any("no checkpoint has" in words for words in node["notes"]) == bool(told)
        lines = run_verdicts(folder.parent, ["alpha"], ended=True)
        assert any("no checkpoint has" in line for line in lines) == bool(told)
    assert not any("no checkpoint has" in line for line in run_verdicts(folder.parent, ["alpha"]))


def unscored(var_dir: Path) -> Path:
    """A run that ended, of whose answers many have no known reward."""
    folder = var_dir / "runs" / "demo" / "alpha"
    folder.mkdir(parents=True)
    (folder / "trainer.log").touch()
    line = {"policy_version": 3, "pass_rate": 0.5, "mean_reward": 0.5, "n": 7, "unknown": 9, "time": 1.0, "held_out": SET}
    (folder / "eval.jsonl").write_text(json.dumps(line) + "\n")
    for replica, cause, answers in (("0", "raised", 30), ("1", "raised", 10), ("2", "timeout", 2), ("3", "no cause", 5)):
        count = {"dataset": "gcd", "cause": cause, "answers": answers}
        (folder / f"unknown_rewards-{replica}.jsonl").write_text(json.dumps(count) + "\n")
    write_note(folder.parent, RunNote("nats://127.0.0.1:1", "nats://127.0.0.1:1", StartOptions()))
    write_end(folder.parent, 0, "progress")
    return folder.parent


def test_the_answers_without_a_known_reward_are_told_of_an_ended_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unscored(tmp_path)
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    left = "answers whose reward is unknown, so they taught nothing: 5 of gcd (no cause), 40 of gcd (raised)"
    held_out = "9 of 16 held-out answers, in 1 of 1 evaluations, have no known reward"
    _, out, _ = swarm("status", "--run", "demo")
    assert left in out and held_out in out and "0.500 @3, 7 of 16" in out
    _, out, _ = swarm("status", "--run", "demo", "--json")
    alpha = json.loads(out[out.index("{") :])["nodes"]["alpha"]
    assert alpha["unknown_rewards"] == {"raised": 40, "timeout": 2} and alpha["evaluation"]["unknown"] == 9
    _, out, _ = swarm("top", "--once", "--run", "demo")
    assert left in out and held_out in out
    end = read_end(folder)
    assert end is not None
    page = swarm_object(ended_run(folder, end), RecentGroups(), ended=True)
    (node,), (row,) = page["nodes"], page["leaderboard"]
    assert any(left in words for words in node["notes"]) and any(held_out in words for words in node["notes"])
    assert (row["n"], row["unknown"]) == (16, 9)


FLAT = {"groups_local": 4, "alike_of": {"wrong": 4}, "cut_off_share": 1.0, "updated": False}
COLLAPSED = {"reward_local": 0.2, "updated": True}


@pytest.mark.parametrize(
    ("steps", "cause", "told"),
    [
        ([], "not_applicable", "nothing can be learnt: the reward returned None for all 9 answers"),
        ([FLAT] * 8, "raised", "32 all wrong; 100% of the answers were cut off"),
        ([{**COLLAPSED, "entropy": 0.5}] * 6 + [{**COLLAPSED, "entropy": 0.001}] * 6, "", "the policy's entropy collapsed"),
    ],
)
def test_why_an_ended_run_learned_nothing_is_told_by_status_and_page_as_by_its_end(
    steps: list[dict[str, Any]], cause: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "demo"
    (folder / "alpha").mkdir(parents=True)
    lines = [json.dumps({"step": number, **step}) + "\n" for number, step in enumerate(steps, 1)]
    (folder / "alpha" / "metrics.jsonl").write_text("".join(lines))
    if cause:
        count = {"dataset": "gcd", "cause": cause, "answers": 9}
        (folder / "alpha" / "unknown_rewards-0.jsonl").write_text(json.dumps(count) + "\n")
    write_note(folder, RunNote("nats://127.0.0.1:1", "nats://127.0.0.1:1", StartOptions()))
    write_end(folder, 0, "progress")
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    said = [line.removeprefix("alpha: ").strip() for line in run_verdicts(folder, ["alpha"], ended=True)]
    assert any(told in line for line in said[:4])
    for command in (("status",), ("top", "--once")):
        _, out, _ = swarm(*command, "--run", "demo")
        assert [line for line in said if line not in out] == [], out
        assert " made " not in out, "of an ended run the groups since a start are not known"
    end = read_end(folder)
    assert end is not None
    (node,) = swarm_object(ended_run(folder, end), RecentGroups(), ended=True)["nodes"]
    assert any(told in words for words in node["notes"][:3]), "the page shows three"


def test_rollouts_of_a_run_without_a_batch_say_that_none_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "short"
    (folder / "alpha").mkdir(parents=True)
    (folder / "alpha" / "eval.jsonl").write_text("")
    write_note(folder, RunNote("nats://127.0.0.1:1", "none", StartOptions()))
    write_end(folder, 0, "progress")
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    code, out, err = swarm("rollouts", "alpha", "--run", "short")
    assert (code, out) == (0, "") and "no batch of alpha is on record" in err and "matches" not in err


def test_what_is_no_run_here_is_refused_with_the_runs_that_are(var_dir: Path) -> None:
    code, _, err = swarm("status", "--run", "second")
    assert code == 1 and "no run 'second'" in err and "newest are first" in err


def test_a_run_that_starts_while_it_is_looked_at_is_not_hindered(var_dir: Path) -> None:
    folder = var_dir / "runs" / "first"
    config = load_config(DEMO_CONFIG)
    with looking_at(config, "first", "") as target:
        assert target.ended is not None and (target.node_url, target.swarm_url) == ("", None)
        with holding_run(folder):
            pass
    with holding_run(folder), looking_at(config, "first", "") as target:
        assert target.ended is None and target.node_url == noted_url(folder), "it is looked at as it runs"


def noted_url(folder: Path) -> str:
    return str(json.loads((folder / "up.json").read_text())["node_url"])


def test_the_page_shows_an_ended_run_from_its_records(var_dir: Path, tmp_path: Path) -> None:
    shown = Dashboard("", "--run", "first", var_dir=var_dir)
    try:
        found = shown.until(lambda told: told["state"] == "ended" and bool(told["batches"]), "its batches read")
        assert found["ended"]["in_order"] and "run first ended in order" in found["ended"]["words"]
        assert {node["node"]: node["kind"] for node in found["nodes"]} == {"alpha": "finished", "beta": "finished"}
        assert ["alpha", "beta", "basic_arithmetic", 6] in found["exchange"]
        assert (found["exchange_since"], found["exchange_uncounted"]) == ({}, [])
        assert scores(found) == [(9, 0.75, 0.125), (9, 0.75, 0.125)]
        for path in ("step.json?node=alpha&step=2", "group.json?node=alpha&step=1&place=0", "node.json?node=beta"):
            with urllib.request.urlopen(shown.url + path, timeout=60) as answer:
                assert json.load(answer)["node"] in ("alpha", "beta")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(shown.url + "step.json?node=alpha&step=999", timeout=60)
        assert refused.value.code == 404 and "steps 1 to 6" in json.load(refused.value)["problem"]
    finally:
        shown.close()


def test_a_page_that_was_told_of_nothing_shows_the_records_of_its_run_when_it_ends(tmp_path: Path) -> None:
    var_dir = tmp_path / "var"
    first = NatsServer(tmp_path / "one")
    shown: Dashboard | None = None
    try:
        with running(var_dir, "one", first):
            shown = Dashboard("", var_dir=var_dir)
            told = shown.until(lambda found: bool(found.get("leaderboard")), "its score")
            assert (told["server"], scores(told)) == (first.url, [(4, 0.5, None)])
            first.stop()
            evaluated(var_dir / "runs" / "one" / "alpha")
            trained_on(var_dir / "runs" / "one" / "alpha", 7, [group("alpha", "beta", "2 * 3?", [("6", 1.0), ("5", 0.0)])])
            write_end(var_dir / "runs" / "one", 0, "progress")
        told = shown.until_state("ended")
        assert told["exchange"] == [["alpha", "beta", "gcd", 1]], "the last lines of the files are read too"
        assert scores(told) == [(9, 0.75, 0.125)], "and the last scores, which nobody passed on"
        assert told["run"] == "one"
        assert (told["problem"], told["ended"]["next"][-1][1]) == ("", "swarm up --run one"), "its server ended with it"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(shown.url + "step.json?node=alpha&step=1", timeout=60)
        assert "it has no batches.jsonl here" in json.load(refused.value)["problem"]
        seen = {(node["node"], node["kind"]) for node in told["nodes"]}
        assert seen == {("alpha", "finished")}, "it is its records now, and runs no longer"
    finally:
        first.stop()
        said = shown.close() if shown else ""
    assert "run one: found 1 node" in said and "run one ended in order at" in said


def test_a_page_that_is_opened_after_the_run_ended_shows_its_records(var_dir: Path) -> None:
    shown = Dashboard("", var_dir=var_dir)
    try:
        assert shown.until_state("ended")["run"] == "first"
    finally:
        said = shown.close()
    assert "run first ended in order at" in said and "swarm up --run first" in said


def test_what_an_earlier_run_left_on_a_server_is_not_shown_under_a_later_runs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of one person on a server that outlives them, in one swarm: the first has ended."""
    runs, server = tmp_path / "runs", NatsServer(tmp_path / "nats").start()
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    async def write() -> None:
        for run, node in (("one", "alpha"), ("one", "beta"), ("two", "gamma")):
            swarm = await PageSwarm.open(server.url, runs / run)
            await swarm.node(node, run=run, state="stopped" if run == "one" else "working", age_s=100.0 if run == "one" else -600.0)
            await swarm.score(swarm.report(node, 4, 0.5))
            await swarm.batch(node, group(node, node, f"What {node} asks?", [("6", 1.0), ("5", 0.0)]))
            await swarm.transport.close()

    asyncio.run(write())
    write_note(runs / "one", RunNote(server.url, server.url, StartOptions(), "first"))
    write_end(runs / "one", 0, "progress")
    (runs / "one" / "alpha" / "trained.jsonl").write_text(trained_line(1, 1.0, updated=True, updates=1, groups=[]) + "\n")
    (runs / "two" / "alpha").mkdir()
    later = (
        trained_line(1, 9.0, updated=True, updates=1, groups=[]) + "\n" + trained_line(2, 9.0, updated=True, updates=1, groups=[])
    )
    (runs / "two" / "alpha" / "trained.jsonl").write_text(later + "\n")
    shown: Dashboard | None = None
    try:
        with holding_run(runs / "two"):
            write_note(runs / "two", RunNote(server.url, server.url, StartOptions(), "first"))
            code, out, _ = swarm("status", "--json")
            told = json.loads(out)
            assert (code, list(told["nodes"]), told["of_earlier_runs"]) == (0, ["gamma"], ["alpha", "beta"])
            assert list(json.loads(swarm("status", "--json", "alpha")[1])["nodes"]) == ["alpha"], "who names it sees it"
            _, out, _ = swarm("top", "--once")
            assert "gamma" in out and "as earlier runs left them on this server: alpha, beta" in out
            code, out, err = swarm("rollouts", "alpha", "--trained", "--json")
            assert code == 0 and out == "" and "no group in the batches of alpha matches" in err, "its own run has no such record"
            shown = Dashboard("", var_dir=tmp_path)
            found = shown.until(lambda each: bool(each.get("groups")), "its groups")
            assert [node["node"] for node in found["nodes"]] == ["gamma"] and found["earlier"] == ["alpha", "beta"]
            assert [row["node"] for row in found["leaderboard"]] == ["gamma"]
            assert [(each["taker"], each["question"]) for each in found["groups"]] == [("gamma", "What gamma asks?")]
            assert found["exchange"] == [["gamma", "gamma", "gcd", 1]]
    finally:
        if shown is not None:
            shown.close()
        server.stop()


def test_a_page_forgets_what_it_saw_when_another_store_is_at_the_address(tmp_path: Path) -> None:
    first = NatsServer(tmp_path / "one").start()

    async def write(url: str, node: str) -> None:
        swarm = await PageSwarm.open(url)
        await swarm.node(node, age_s=-600.0)
        await swarm.score(swarm.report(node, 4, 0.5))
        await swarm.batch(node, group(node, node, f"What {node} asks?", [("6", 1.0), ("5", 0.0)]))
        await swarm.transport.close()

    asyncio.run(write(first.url, "alpha"))
    shown = Dashboard(first.url, var_dir=tmp_path)
    second = NatsServer(tmp_path / "two", port=first.port)
    try:
        shown.until(lambda each: [group["taker"] for group in each.get("groups", [])] == ["alpha"], "alpha's group")
        first.stop()
        second.start()
        asyncio.run(write(second.url, "gamma"))
        found = shown.until(lambda each: "gamma" in [group["taker"] for group in each.get("groups", [])], "gamma's group")
        assert [node["node"] for node in found["nodes"]] == [group["taker"] for group in found["groups"]] == ["gamma"]
        assert {row["node"] for row in found["leaderboard"]} <= {"gamma"}
    finally:
        shown.close()
        for server in (first, second):
            server.stop()


@contextmanager
def running(var_dir: Path, run: str, server: NatsServer) -> Iterator[None]:
    """A run of one node, whose server runs; only its lock says that the run runs."""
    server.start()

    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await swarm.node("alpha")
        await swarm.score(swarm.report("alpha", 4, 0.5))
        await swarm.transport.close()

    asyncio.run(write())
    with holding_run(var_dir / "runs" / run):
        write_note(var_dir / "runs" / run, RunNote(server.url, server.url, StartOptions()))
        yield


def evaluated(folder: Path) -> None:
    """Write the scores that the node of `running` has on record at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    for version, rate in ((0, 0.125), (4, 0.5), (9, 0.75)):
        line = {"policy_version": version, "pass_rate": rate, "n": 200, "time": time.time(), "held_out": SET}
        with (folder / "eval.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def scores(told: dict[str, Any]) -> list[tuple[int, float, float | None]]:
    return [(row["version"], row["newest"], row["base"]) for row in told["leaderboard"]]

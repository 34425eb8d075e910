"""`swarm up` as a newcomer runs it: real server, real services, from the first line to the summary.

One node, which a second one joins: each costs a dozen seconds of a core to start. Two nodes from
the first line are in `test_up_in_turns.py` and `tests/e2e/test_extension_examples.py`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.status_figures import STATUS_INTERVAL_S
from shared.roles import ROLES
from shared.run_records import CHECKPOINTS, checkpoint_steps
from swarm_cli.observe.run_files import read_evaluations, read_steps
from tests import forked
from tests.integration.local_swarm import ROOT, START_TIMEOUT_S, Swarm, python_that_forks

STEPS = 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    # Nobody else is there to wait for until the second node joins.
    # The format is the one of a configuration that names none, unlike the demo's.
    logs = {"SWARM_LOG__FORMAT": "auto", "SWARM_LOG__LEVEL": "info"}
    yield Swarm(tmp_path_factory.mktemp("swarm"), SWARM_SAMPLER__EXTERNAL="0", **logs)


@pytest.fixture(scope="module")
def finished(swarm: Swarm) -> subprocess.CompletedProcess[str]:
    return swarm.up_to_the_end("--nodes", "1", "--steps", str(STEPS))


def test_a_run_with_steps_ends_by_itself_with_a_summary_and_exit_code_0(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stdout[-6000:]
    assert f"all nodes have taken {STEPS} steps" in finished.stdout
    assert "swarm plot first" in finished.stdout
    assert "Traceback" not in finished.stdout


def test_the_services_lines_are_for_people(finished: subprocess.CompletedProcess[str]) -> None:
    assert any("alpha-trainer" in line and "| info: " in line for line in finished.stdout.splitlines()), finished.stdout[-3000:]
    assert not [line for line in finished.stdout.splitlines() if "| {" in line]


def test_the_services_end_in_time_when_the_run_does(finished: subprocess.CompletedProcess[str]) -> None:
    assert "is killed:" not in finished.stdout, finished.stdout[-3000:]


def test_the_node_leaves_its_steps_and_evaluations(swarm: Swarm, finished: subprocess.CompletedProcess[str]) -> None:
    assert [step["step"] for step in read_steps(swarm.node_dir("alpha"))] == list(range(1, STEPS + 1))
    found = read_evaluations(swarm.node_dir("alpha"))
    for each in (found[0], found[-1]):
        rates = [sum(bool(passed) for _, passed in each.answers), len(each.answers)]
        assert rates == [round((each.pass_rate or 0.0) * each.n), each.n], "each question's answer, by which the two are compared"
    versions = [evaluation.policy_version for evaluation in found]
    assert versions[0] == 0, "the base policy was not evaluated"
    assert versions[-1] == STEPS
    assert (swarm.node_dir("alpha") / "trainer.log").stat().st_size > 0


def test_the_curves_of_the_run_can_be_drawn(swarm: Swarm, finished: subprocess.CompletedProcess[str]) -> None:
    plotted = swarm.call("plot", "first")
    assert plotted.returncode == 0, plotted.stderr
    assert Path(plotted.stdout.strip()).read_bytes().startswith(b"\x89PNG")


def test_status_says_how_the_run_ended_with_an_exit_code_of_its_own(
    swarm: Swarm, finished: subprocess.CompletedProcess[str]
) -> None:
    gone = swarm.call("status", "--node-url", f"nats://127.0.0.1:{swarm.nats_port}")
    assert gone.returncode == 3 and "run first ended in order at" in gone.stderr and "has taken its steps" in gone.stderr
    looked = swarm.call("status", "--run", "first")
    assert looked.returncode == 3 and looked.stdout.count("ended") >= len(ROLES) and "silent" not in looked.stdout


@pytest.fixture(scope="module")
def exported(swarm: Swarm, finished: subprocess.CompletedProcess[str]) -> Path:
    folder = swarm.folder / "exported"
    answer = swarm.call("model", "export", "first", "alpha", str(folder))
    assert answer.returncode == 0, answer.stderr
    return folder


def test_a_trained_policy_is_exported_and_scored(swarm: Swarm, exported: Path) -> None:
    scored = swarm.call("eval", str(exported), "--tasks", "chain_sum,gcd", "--n", "8", "--json", "--answers", "3")
    assert scored.returncode == 0, scored.stderr
    report = json.loads(scored.stdout)
    assert report["n"] == 8 and set(report["per_task"]) == {"chain_sum", "gcd"}
    assert [each["dataset"] for each in report["answers"]] == ["chain_sum"] * 3 + ["gcd"] * 3
    assert all(each["question"] and each["reference"] and 0 <= each["reward"] <= 1 for each in report["answers"])
    shown = swarm.call("eval", str(exported), "--tasks", "chain_sum", "--n", "2", "--answers", "1")
    assert shown.returncode == 0, shown.stderr
    assert "reference" in shown.stdout and shown.stdout.count("chain_sum") == 2
    assert "answers" not in json.loads(swarm.call("eval", str(exported), "--tasks", "chain_sum", "--n", "2", "--json").stdout)


def test_eval_asks_the_held_out_questions_that_the_configuration_names(swarm: Swarm, exported: Path, tmp_path: Path) -> None:
    asked = []
    for draw in (0, 3, 3):
        (tmp_path / "node.toml").write_text(f'[eval]\ndraw = {draw}\n[[tasks]]\ndataset = "base_conversion"\n')
        scored = swarm.call("eval", str(exported), "--config", str(tmp_path / "node.toml"), "--n", "4", "--json", "--answers", "4")
        assert scored.returncode == 0, scored.stderr
        asked.append([each["question"] for each in json.loads(scored.stdout)["answers"]])
    assert asked[0] != asked[1] == asked[2]


def test_eval_of_a_nodes_folder_asks_what_the_node_held_out(swarm: Swarm, finished: subprocess.CompletedProcess[str]) -> None:
    """The run had SWARM_EVAL__TASKS=8, and the configuration has 200."""
    environment = {name: value for name, value in swarm.environment.items() if name != "SWARM_EVAL__TASKS"}
    reports = []
    for more in ((), ("--n", "20")):
        arguments = ("eval", str(swarm.node_dir("alpha")), "--json", *more)
        scored = forked.run("swarm_cli", arguments, environment=environment, cwd=ROOT, timeout=START_TIMEOUT_S)
        assert scored.returncode == 0, scored.stderr
        reports.append(json.loads(scored.stdout))
    assert [(report["n"], report["not_held_out"]) for report in reports] == [(8, 0), (20, 12)]
    assert "12 of these 20 tasks are not among the 8 that the node held out: it may have trained on them" in scored.stderr
    newest = max(checkpoint_steps(swarm.node_dir("alpha") / CHECKPOINTS))
    assert [report["step"] for report in reports] == [newest] * 2 and f"step {newest}" in scored.stderr


def goes_on(node: dict[str, Any]) -> bool:
    """A service that is slow is not taken for dead here: what `alive` means stands in
    `shared.runtime.status`.
    """
    return node["step"] > STEPS and all(any(replica["alive"] for replica in replicas) for replicas in node["services"].values())


def test_a_run_goes_on_by_its_name_is_seen_by_status_and_stops_on_ctrl_c(
    swarm: Swarm, finished: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    # The first run has started its services as users do.
    with python_that_forks(tmp_path) as swarm.python:
        process = swarm.up()
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while time.monotonic() < deadline:
                seen = swarm.status("alpha")
                # A trainer goes on with what the last run left, perhaps before a slower service
                # says that it is there.
                if seen and goes_on(seen["nodes"]["alpha"]):
                    break
                time.sleep(STATUS_INTERVAL_S)
            else:
                pytest.fail(f"the node did not go on within the deadline: {json.dumps(seen)[:6000]}")
            with swarm.resting("alpha"):
                again = swarm.call("up", "--nats-port", str(swarm.nats_port), "--base-port", str(swarm.base_port))
                unasked = swarm.call("status", "--json")
        finally:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=180)
    swarm.python = None
    assert process.returncode == 130
    assert "continues where it stopped" in err
    alpha = seen["nodes"]["alpha"]
    assert set(alpha["services"]) == set(ROLES)
    assert {stream["stream"] for stream in alpha["streams"]} >= {"NODE_ALPHA_ROLLOUTS", "NODE_ALPHA_SCORED", "NODE_ALPHA_BATCHES"}
    assert alpha["streams"][0]["consumer_pending"] is not None
    assert unasked.returncode == 0 and set(json.loads(unasked.stdout)["nodes"]) >= {"alpha"}, unasked.stderr
    assert f"swarm up --run first --nats-port {swarm.nats_port} --base-port {swarm.base_port}" in err
    assert again.returncode == 1 and f"port {swarm.nats_port}" in again.stderr, "a second swarm on the same ports must say so"

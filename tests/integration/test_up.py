"""`swarm up` as a newcomer runs it: real server, real services, two nodes, from the first line to
the summary, and its page in a real browser.
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

from shared.roles import ROLES
from shared.runtime.status import STATUS_INTERVAL_S
from swarm_cli.observe.evaluations import read_evaluations, read_steps
from tests.integration.local_swarm import START_TIMEOUT_S, Swarm
from tests.integration.page_looker import Looker, a_browser
from tests.integration.page_swarm import Dashboard

STEPS = 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    yield Swarm(tmp_path_factory.mktemp("swarm"))


@pytest.fixture(scope="module")
def finished(swarm: Swarm) -> subprocess.CompletedProcess[str]:
    process = swarm.up("--steps", str(STEPS))
    try:
        out, err = process.communicate(timeout=START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        pytest.fail(f"swarm up --steps {STEPS} did not end by itself:\n{out[-6000:]}\n{err[-2000:]}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_run_with_steps_ends_by_itself_with_a_summary_and_exit_code_0(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stdout[-6000:]
    assert f"all nodes have taken {STEPS} steps" in finished.stdout
    assert "swarm plot first" in finished.stdout
    assert "Traceback" not in finished.stdout


def test_the_services_end_in_time_when_the_run_does(finished: subprocess.CompletedProcess[str]) -> None:
    assert "is killed:" not in finished.stdout, finished.stdout[-3000:]


@pytest.mark.parametrize("node", ["alpha", "beta"])
def test_each_node_leaves_its_steps_and_evaluations(swarm: Swarm, finished: subprocess.CompletedProcess[str], node: str) -> None:
    assert [step["step"] for step in read_steps(swarm.node_dir(node))] == list(range(1, STEPS + 1))
    versions = [evaluation.policy_version for evaluation in read_evaluations(swarm.node_dir(node))]
    assert versions[0] == 0, "the base policy was not evaluated"
    assert versions[-1] == STEPS
    assert (swarm.node_dir(node) / "trainer.log").stat().st_size > 0


def test_the_curves_of_the_run_can_be_drawn(swarm: Swarm, finished: subprocess.CompletedProcess[str]) -> None:
    plotted = swarm.call("plot", "first")
    assert plotted.returncode == 0, plotted.stderr
    assert Path(plotted.stdout.strip()).read_bytes().startswith(b"\x89PNG")


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


@pytest.fixture(scope="module")
def shown(
    swarm: Swarm, finished: subprocess.CompletedProcess[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dashboard]:
    """A page that was told of no server, opened when no run runs."""
    page = Dashboard("", tmp_path_factory.mktemp("page"), var_dir=swarm.folder / "var")
    yield page
    page.process.terminate()
    page.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def going_on(swarm: Swarm, shown: Dashboard) -> Iterator[subprocess.Popen[str]]:
    """The run that took its steps, until Ctrl-C."""
    process = swarm.up()
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def stopped(going_on: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """What it said until Ctrl-C."""
    going_on.send_signal(signal.SIGINT)
    out, err = going_on.communicate(timeout=30)
    return subprocess.CompletedProcess(going_on.args, going_on.returncode, out, err)


def goes_on(node: dict[str, Any]) -> bool:
    """A service that is slow is not taken for dead here: what `alive` means stands in
    `shared.runtime.status`.
    """
    return node["step"] > STEPS and all(any(replica["alive"] for replica in replicas) for replicas in node["services"].values())


def test_a_run_that_ended_is_told_with_an_exit_code_of_its_own(swarm: Swarm, finished: subprocess.CompletedProcess[str]) -> None:
    gone = swarm.call("status", "--node-url", f"nats://127.0.0.1:{swarm.nats_port}")
    assert gone.returncode == 3 and "run first ended in order at" in gone.stderr and "has taken its steps" in gone.stderr
    looked = swarm.call("status", "--run", "first")
    assert looked.returncode == 3 and looked.stdout.count("ended") == 2 * len(ROLES) and "silent" not in looked.stdout


def test_a_run_goes_on_by_its_name_is_seen_by_status_and_takes_a_third_node(swarm: Swarm, going_on: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        seen = swarm.status()
        # A trainer goes on with what the last run left, perhaps before a slower service speaks.
        if seen and all(goes_on(seen["nodes"][node]) for node in ("alpha", "beta")):
            break
        time.sleep(STATUS_INTERVAL_S)
    else:
        pytest.fail(f"the nodes did not go on within the deadline: {json.dumps(seen)[:6000]}")
    again = swarm.call("up", "--nats-port", str(swarm.nats_port), "--base-port", str(swarm.base_port))
    added = swarm.call("add")
    unasked = swarm.call("status", "--json")
    while time.monotonic() < deadline:
        third = swarm.status("gamma")
        if third and all(any(replica["alive"] for replica in third["nodes"]["gamma"]["services"][role]) for role in ROLES):
            break
        time.sleep(STATUS_INTERVAL_S)
    else:
        pytest.fail(f"the third node did not come:\n{added.stderr}\n{json.dumps(third)[:3000]}")
    alpha = seen["nodes"]["alpha"]
    assert seen["ended"] is None and set(alpha["services"]) == set(ROLES)
    assert {stream["stream"] for stream in alpha["streams"]} >= {"NODE_ALPHA_ROLLOUTS", "NODE_ALPHA_SCORED", "NODE_ALPHA_BATCHES"}
    assert alpha["streams"][0]["consumer_pending"] is not None
    assert unasked.returncode == 0 and set(json.loads(unasked.stdout)["nodes"]) >= {"alpha", "beta"}, unasked.stderr
    goes_on_with = f"swarm up --run first --nodes 3 --nats-port {swarm.nats_port} --base-port {swarm.base_port}"
    assert goes_on_with in added.stderr
    assert added.returncode == 0 and "gamma-trainer: process" in added.stderr
    assert (swarm.node_dir("gamma") / "generator.log").stat().st_size > 0
    assert again.returncode == 1 and f"port {swarm.nats_port}" in again.stderr, "a second swarm on the same ports must say so"


def test_a_page_that_waited_turns_to_the_run_and_shows_who_took_whose_groups(
    shown: Dashboard, going_on: subprocess.Popen[str]
) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    taken: set[tuple[str, str]] = set()
    while not taken >= {(taker, sender) for taker in ("alpha", "beta") for sender in ("alpha", "beta")}:
        assert time.monotonic() < deadline, f"only {taken}"
        told = shown.until_state("running", "starting")
        taken = {(taker, sender) for taker, sender, _, groups in told.get("exchange", []) if groups > 0}
        time.sleep(0.5)


def test_the_run_stops_on_ctrl_c_and_says_how_it_is_gone_on_with(
    swarm: Swarm, stopped: subprocess.CompletedProcess[str], shown: Dashboard
) -> None:
    assert stopped.returncode == 130
    assert "goes on where it stopped" in stopped.stderr
    assert f"swarm up --run first --nodes 3 --nats-port {swarm.nats_port} --base-port {swarm.base_port}" in stopped.stderr
    told = shown.until_state("ended")["ended"]
    assert told["run"] == "first" and told["in_order"] and "it was stopped" in told["words"]


def test_the_page_of_the_ended_run_leads_from_a_step_s_reward_to_groups_with_the_texts_of_the_logs(
    swarm: Swarm, stopped: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    shown = Dashboard("", tmp_path, "--run", "first", var_dir=swarm.folder / "var")
    try:
        shown.until_state("ended")
        with a_browser() as browser:
            looker = Looker(browser)
            page = looker.open(shown.url)
            page.get_by_role("heading", name="The run has ended").wait_for()
            page.get_by_text("it was stopped").first.wait_for()
            page.locator("#exchange tbody tr").first.wait_for()
            page.locator("#nodes").get_by_role("link", name="alpha").click()
            page.locator("#steps .legend").wait_for()
            page.locator("#steps a").last.press("Enter")
            heading = page.get_by_role("heading", level=1, name="Step")
            heading.wait_for()
            step = heading.inner_text().split()[1]
            logged = swarm.call("rollouts", "alpha", "--run", "first", "--step", step, "--json")
            groups = [json.loads(line) for line in logged.stdout.splitlines()]
            assert page.locator("main li.card").count() == len(groups) > 0, logged.stderr
            page.locator("main li.card a").first.click()
            for place, group in enumerate(groups):
                page.get_by_role("heading", name=f"Group {place} of step {step}").wait_for()
                texts = [text.replace("↵\n", "\n") for text in page.locator("main pre").all_text_contents()]
                answers = [completion["text"] or "(empty)" for completion in group["completions"]]
                assert texts[:2] == [group["question"], group["reference"]]
                # The page has the token that ended an answer too.
                assert [text.removesuffix("<|im_end|>") for text in texts[2:]] == answers
                whose = page.locator("dl div", has_text="Whose").inner_text()
                assert whose.endswith(group["sender"]) and group["origin"] in whose
                if place + 1 < len(groups):
                    page.get_by_role("link", name="group after").click()
            looker.check()
            looker.close()
    finally:
        shown.close()

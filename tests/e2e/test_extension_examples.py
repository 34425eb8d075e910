"""Every example of docs/examples is installed as a package, and all of them together run a
swarm, which the page shows when it has ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shared import registry
from shared.registry import Registry
from swarm_cli.observe.run_files import read_steps
from tests.integration.local_swarm import Swarm, python_that_forks
from tests.integration.page_looker import Looker, a_browser
from tests.integration.page_swarm import Dashboard

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("docs/examples/*/pyproject.toml"))
GROUPS = {each.group for each in vars(registry).values() if isinstance(each, Registry)}
NODES = ("alpha", "beta")
SMALL = {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20}

pytestmark = pytest.mark.slow


def group_of(example: Path) -> str:
    (group,) = tomllib.loads(example.read_text())["project"]["entry-points"]
    return str(group)


def test_every_registry_has_an_example_and_a_page() -> None:
    assert {group_of(example) for example in EXAMPLES} == GROUPS
    assert {page.stem for page in ROOT.glob("docs/extend/*.md")} - {"README"} == {example.parent.name for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.parent.name)
def test_an_example_is_short_and_its_page_shows_all_of_it(example: Path) -> None:
    (module,) = example.parent.glob("swarm_example_*.py")
    assert len(module.read_text().splitlines()) <= 60
    page = (ROOT / f"docs/extend/{example.parent.name}.md").read_text()
    assert module.read_text().strip() in page, f"docs/extend/{example.parent.name}.md does not show {module.name} as it is"
    assert example.read_text().strip().split("\n\n")[2] in page, "the page does not show the entry point"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all the examples, as pip installs them."""
    folder, copies = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("sources")
    sources = [shutil.copytree(example.parent, copies / example.parent.name) for example in EXAMPLES]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), *map(str, sources)], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def swarm(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Swarm:
    """Two nodes that have taken two steps and ended."""
    folder = tmp_path_factory.mktemp("swarm")
    with python_that_forks(folder) as python:
        return ended_swarm(folder, python, installed)


def ended_swarm(folder: Path, python: Path, installed: Path) -> Swarm:
    swarm = Swarm(
        folder,
        python,
        PYTHONPATH=os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH", "")])),
        SWARM_NODE__SEED="1",
        SWARM_TRAINER__OBJECTIVE="tapered",
        SWARM_TRAINER__OBJECTIVE_OPTIONS='{"floor": 0.1}',
        SWARM_TRAINER__UPDATES_PER_BATCH="2",
        SWARM_SAMPLER__STRATEGY="contested",
        SWARM_GENERATOR__ENGINE="plain",
        SWARM_POLICY_STORE__URI=(folder / "policies").as_uri().replace("file://", "zstd://"),
        SWARM_TRACKING__TRACKERS='["csv"]',
        SWARM_TRACKING__OPTIONS='{"columns": "train/learning_rate"}',
        SWARM_LOG__LEVEL="info",
        SWARM_TASKS=json.dumps(
            [
                {"dataset": "gcd", "verifier": "brief", "config": SMALL},
                {"dataset": "change_due", "verifier": "final_number", "config": {"most_cents": 20}},
                {"dataset": "lcm", "environment": "high_low", "max_turns": 3, "config": SMALL},
            ]
        ),
    )
    checked = swarm.call("config", "check")
    assert checked.returncode == 0, checked.stderr
    ended = swarm.up_to_the_end("--steps", "2")
    assert ended.returncode == 0, ended.stdout[-6000:]
    return swarm


def logged(swarm: Swarm, node: str, role: str, event: str) -> list[dict[str, Any]]:
    lines = (swarm.node_dir(node) / f"{role}.log").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["event"] == event]


def test_a_swarm_runs_with_all_of_them(swarm: Swarm) -> None:
    """A step in which every answer of each group got the same reward updates nothing; not all four
    are such.
    """
    for node in NODES:
        steps = read_steps(swarm.node_dir(node))
        assert [step["step"] for step in steps] == [1, 2]
        assert {event["strategy"] for event in logged(swarm, node, "sampler", "batch")} == {"contested"}
        assert [event["engine"] for event in logged(swarm, node, "generator", "generating")] == ["plain"]
        assert {event["task"] for event in logged(swarm, node, "verifier", "rollouts_scored")} == {"gcd", "change_due", "lcm"}
        assert all(step["learning_rate"] > 0 and step["updates"] == (2 if step["updated"] else 0) for step in steps)
        rows = (swarm.node_dir(node) / "steps.csv").read_text().splitlines()
        assert [row.split(",")[0] for row in rows] == ["step", "1", "2"] and rows[0] == "step,train/learning_rate"
        assert list((swarm.folder / "policies").glob(f"{node}.2.*.zst"))
    assert any(step["updated"] for node in NODES for step in read_steps(swarm.node_dir(node)))


def test_the_page_of_the_run_shows_who_took_whose_groups_and_leads_from_a_reward_to_the_texts_of_the_logs(
    swarm: Swarm, tmp_path: Path
) -> None:
    logs = {node: groups_in_log(swarm, node) for node in NODES}
    shown = Dashboard("", "--run", "first", var_dir=swarm.folder / "var")
    try:
        taken = {node: Counter(trained_on(swarm, node).values()) for node in NODES}
        batches = sum(len({group["step"] for group in groups}) for groups in logs.values())
        told = shown.until(lambda told: told["state"] == "ended" and told["batches"] == batches, f"{batches} batches read")
        shown_taken: dict[str, Counter[str]] = {node: Counter() for node in NODES}
        for taker, sender, _, groups in told["exchange"]:
            shown_taken[taker][sender] += groups
        assert shown_taken == taken
        assert {dataset for _, _, dataset, _ in told["exchange"]} <= {"gcd", "change_due", "lcm"}
        with a_browser() as browser:
            looker = Looker(browser)
            page = looker.open(shown.url)
            page.get_by_role("heading", name="Take it home").wait_for()
            page.get_by_text("Run first ended in order").wait_for()
            page.locator("#fold > summary").click()
            counts = re.findall(r"\d+", page.locator("#nodes tbody tr").first.locator("td").nth(2).inner_text())
            assert [int(number) for number in counts] == [taken["alpha"][sender] for sender in ("alpha", "beta")]
            assert page.locator("#exchange").count() == 0, "who teaches whom is a question of three nodes or more"
            page.locator("#nodes").get_by_role("link", name="alpha").click()
            # The sampler may have made the next batch before the trainer ended.
            taken_steps = {step["step"] for step in read_steps(swarm.node_dir("alpha"))}
            step = max(group["step"] for group in logs["alpha"] if group["step"] in taken_steps)
            page.get_by_role("link", name=f"step {step}:").first.press("Enter")
            page.get_by_role("heading", name=f"Step {step} of alpha").wait_for()
            page.locator("main li.card a").first.click()
            wanted = [group for group in logs["alpha"] if group["step"] == step]
            for place, group in enumerate(wanted):
                page.get_by_role("heading", name=f"Group {place} of step {step}").wait_for()
                texts = [text.replace("↵\n", "\n") for text in page.locator("main pre").all_text_contents()]
                answers = [completion["text"] or "(empty)" for completion in group["completions"]]
                # The page has the token that ended an answer too.
                assert [text.removesuffix("<|im_end|>") or "(empty)" for text in texts] == [
                    group["question"],
                    group["reference"],
                    *answers,
                ]
                whose = page.locator("dl div", has_text="Whose").inner_text()
                assert whose.endswith(group["sender"]) and group["origin"] in whose
                if place + 1 < len(wanted):
                    page.get_by_role("link", name="group after").click()
            looker.check()
            looker.close()
    finally:
        shown.close()


def trained_on(swarm: Swarm, node: str) -> dict[str, str]:
    """Id and sender of each group that the node's trainer recorded as trained on, by steps that
    moved it.
    """
    steps = map(json.loads, (swarm.node_dir(node) / "trained.jsonl").read_text().splitlines())
    return {
        group["id"]: group["sender"] for step in steps if step["updated"] for group in step["groups"] if group["fate"] == "trained"
    }


def groups_in_log(swarm: Swarm, node: str) -> list[dict[str, Any]]:
    told = swarm.call("rollouts", node, "--run", "first", "--json", "--limit", "1000")
    assert told.returncode == 0, told.stderr
    return [json.loads(line) for line in told.stdout.splitlines()]

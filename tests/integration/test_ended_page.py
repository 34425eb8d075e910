"""The page of an ended run in a real browser: the batch whose step was never taken, the steps that
were, and panels without processes.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from services.trainer.trained import trained_line
from shared.run_records import TRAINED_FILE
from swarm_cli.dashboard.recent_groups import STEPS_A_NODE
from swarm_cli.local.run_note import write_note
from swarm_cli.run_end import write_end
from swarm_cli.running import RunNote
from tests.integration.page_looker import Looker, a_browser
from tests.integration.page_swarm import Dashboard, PageSwarm, group, trained_on
from tests.nats_server import NatsServer

pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra `test`")
PROMETHEUS = shutil.which("prometheus") is not None
GONE = "ab" * 32
"""A group of step 9, which only the trainer's record still names."""
NEVER = "no step trained on it: the run ended first"


@pytest.fixture
def var_dir(tmp_path: Path) -> Path:
    """A run of 67 steps, of whose batches the log has the last two and one for another. The
    trainer's process said last that it had taken 66.
    """
    var_dir = tmp_path / "var"
    folder = var_dir / "runs" / "first"
    server = NatsServer(tmp_path / "nats", jetstream=f'store_dir: "{folder}"').start()

    async def write() -> None:
        swarm = await PageSwarm.open(server.url, folder)
        await swarm.node("alpha", step=66, finished=True)
        for step in range(1, 66):
            trained_on(folder / "alpha", step, [group("alpha", "alpha", "1 + 1?", [("2", 1.0), ("3", 0.0)])])
        swarm.number["alpha"] = 65
        for number in range(3):
            swarm.records = folder if number < 2 else None
            answers = [("6", 1.0), ("5", 0.0)] if number < 2 else [("5", 0.0), ("4", 0.0)]
            await swarm.batch("alpha", group("alpha", "alpha", f"{number} * 3?", answers, n=number))
        await swarm.transport.close()

    asyncio.run(write())
    server.stop()
    lines = [(9, [{"id": GONE, "origin": "local", "sender": "alpha", "fate": "trained"}]), (67, [])]
    written = [trained_line(step, 1.0, updated=True, updates=1, groups=groups) + "\n" for step, groups in lines]
    (folder / "alpha" / TRAINED_FILE).write_text("".join(written))
    write_note(folder, RunNote(server.url, server.url, "swarm up --run first"))
    write_end(folder, 0, "progress")
    return var_dir


def test_the_step_that_was_never_taken_is_no_step_and_its_groups_come_last(var_dir: Path, tmp_path: Path) -> None:
    shown = Dashboard("", tmp_path, "--run", "first", var_dir=var_dir, prometheus=PROMETHEUS)
    try:
        told = shown.until(lambda found: found["state"] == "ended" and bool(found["batches"]), "its batches read")
        assert [each["step"] for each in told["groups"]] == [67, 66, 68], "the one never trained on comes last"
        assert told["nodes"][0]["step"] == 67, "not what its process said a moment before its end"
        with a_browser() as browser:
            looker = Looker(browser, allowed="404")
            page = looker.open(shown.url)
            page.locator("#texts li").first.wait_for()
            for part in ("#nodes", "#texts"):
                assert " ago" not in page.locator(part).inner_text(), "nothing of an ended run grows older as one looks"
            page = looker.open(shown.url + "#/node/alpha")
            page.locator("#steps .chart").wait_for()
            points = (page.locator("#steps polyline").first.get_attribute("points") or "").split()
            assert len(points) == 67, "every step that was taken"
            links = [link.get_attribute("href") for link in page.locator("#steps .chart a").all()]
            assert links == ["#/step/alpha/66", "#/step/alpha/67"], "those whose groups are in the log"
            assert NEVER in page.locator("#texts li").last.inner_text() and page.get_by_text(NEVER).count() == 1
            wrong = page.locator("#texts li").last.locator(".best").inner_text()
            assert wrong.startswith("an answer"), "of answers that are all wrong none is the best"
            assert page.get_by_text("are not shown").count() == 0 and " ago" not in page.locator("main").inner_text()
            page.goto(shown.url + "#/group/alpha/9/0")
            page.locator("code", has_text=f"swarm trace {GONE[:12]} --run first").wait_for()
            page.goto(shown.url + "#/step/alpha/68")
            page.get_by_text("No step trained on this batch").wait_for()
            page.goto(shown.url + "#/group/alpha/68/0")
            page.get_by_role("heading", name="Group 0 of step 68").wait_for()
            page.get_by_role("link", name="Panels").click()
            if PROMETHEUS:
                page.locator("#targets", has_text="the run has ended, so no process is scraped").wait_for()
                page.locator("#alerts", has_text="The run has ended, so no process is scraped: ").wait_for()
            looker.check()
            looker.close()
    finally:
        shown.close()


def test_without_the_trainers_records_the_page_says_why_the_rewards_begin_late_and_what_was_not_trained_on(
    var_dir: Path, tmp_path: Path
) -> None:
    for name in ("metrics.jsonl", TRAINED_FILE):
        (var_dir / "runs" / "first" / "alpha" / name).unlink()
    shown = Dashboard("", tmp_path, "--run", "first", var_dir=var_dir)
    try:
        shown.until(lambda found: found["state"] == "ended" and bool(found["batches"]), "its batches read")
        with a_browser() as browser:
            looker = Looker(browser)
            page = looker.open(shown.url + "#/node/alpha")
            page.get_by_text(f"Steps before 66 are not shown: the page keeps a node's newest {STEPS_A_NODE} steps").wait_for()
            assert page.get_by_text("not trained on, as far as is known").count() == 2, "its process said last that it was at 66"
            assert page.get_by_text("not trained on yet").count() == 0, "nothing is to come"
            looker.check()
            looker.close()
    finally:
        shown.close()

"""The page of an ended run in a real browser, from its records alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.records import batch_line, trained_line
from shared.run_records import BATCHES_FILE, TRAINED_FILE
from swarm_cli.runs import RunNote, StartOptions, write_end, write_note
from tests.integration.page_looker import Looker, a_browser
from tests.integration.page_swarm import Dashboard, batch_of, group, trained_on

pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra `test`")
GONE = "ab" * 32
"""A group of step 9, which only the trainer's record still names."""


@pytest.fixture
def var_dir(tmp_path: Path) -> Path:
    """A run of 67 steps, of whose batches the last two are on record."""
    var_dir = tmp_path / "var"
    folder = var_dir / "runs" / "first" / "alpha"
    for step in range(1, 68):
        answers = [("6", 1.0), ("5", 0.0)] if step < 67 else [("5", 0.0), ("4", 0.5)]
        groups = [group("alpha", "alpha", f"{step} * 3?", answers, n=step)]
        trained_on(folder, step, groups)
        if step > 65:
            with (folder / BATCHES_FILE).open("a") as file:
                file.write(batch_line(batch_of(step, groups)) + "\n")
    lines = [(9, [{"id": GONE, "origin": "local", "sender": "alpha", "fate": "trained"}]), (67, [])]
    written = [trained_line(step, 1.0, updated=True, updates=1, groups=groups) + "\n" for step, groups in lines]
    (folder / TRAINED_FILE).write_text("".join(written))
    url = "nats://127.0.0.1:1"
    write_note(folder.parent, RunNote(url, url, StartOptions()))
    write_end(folder.parent, 0, "progress")
    return var_dir


def test_an_ended_run_is_shown_as_its_records_say_and_nothing_of_it_grows_older(var_dir: Path, tmp_path: Path) -> None:
    shown = Dashboard("", "--run", "first", var_dir=var_dir)
    try:
        told = shown.until(lambda found: found["state"] == "ended" and bool(found["batches"]), "its batches read")
        assert [each["step"] for each in told["groups"]] == [67, 66]
        assert told["nodes"][0]["step"] == 67
        with a_browser() as browser:
            looker = Looker(browser, allowed="404")
            page = looker.open(shown.url)
            page.locator("#texts li").first.wait_for()
            page.get_by_text("This is from its records").wait_for()
            page.locator("#fold > summary").click()
            for part in ("#nodes", "#texts"):
                assert " ago" not in page.locator(part).inner_text(), "nothing of an ended run grows older as one looks"
            page = looker.open(shown.url + "#/node/alpha")
            page.locator("#steps .chart").wait_for()
            points = (page.locator("#steps polyline").first.get_attribute("points") or "").split()
            assert len(points) == 67, "every step that was taken"
            links = [link.get_attribute("href") for link in page.locator("#steps .chart a").all()]
            assert links == ["#/step/alpha/66", "#/step/alpha/67"], "those whose groups are on record"
            assert page.get_by_text("are not shown").count() == 0 and " ago" not in page.locator("main").inner_text()
            page.goto(shown.url + "#/group/alpha/9/0")
            page.locator("code", has_text=f"swarm trace {GONE[:12]} --run first").wait_for()
            page.goto(shown.url + "#/group/alpha/67/0")
            page.get_by_role("heading", name="Group 0 of step 67").wait_for()
            looker.check()
            looker.close()
    finally:
        shown.close()

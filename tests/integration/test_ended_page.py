"""The page of an ended run in a real browser, from its records alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.generator.evaluation import eval_line
from services.trainer.records import batch_line, trained_line
from shared.contracts.control import EvalReport
from shared.run_records import BATCHES_FILE, EVAL_FILE, SAMPLES_FILE, TRAINED_FILE
from swarm_cli.runs import RunNote, StartOptions, write_end, write_note
from tests.integration.page_looker import WAIT_MS, Looker, a_browser
from tests.integration.page_swarm import Dashboard, batch_of, group, trained_on

playwright = pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra `test`")
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


def answered(folder: Path) -> None:
    """Two evaluations of 200 questions, of which four are on record: kept, learnt, wrong in part
    and forgotten.
    """
    kinds = {"kept": (1.0, 1.0), "learnt": (0.0, 1.0), "in part": (0.0, 0.2), "lost": (1.0, 0.0)}
    for place, (version, rate) in enumerate(((0, 0.32), (67, 0.83))):
        report = EvalReport(
            node="alpha", policy_version=version, created_at=1.0 + version, n=200, pass_rate=rate, mean_reward=rate + 0.01 * place,
            per_task={}, seconds=1.0, held_out="ab" * 32,
        )  # fmt: skip
        samples = [
            {
                "dataset": "sums", "seed": 1, "index": index, "question": f"How much is {kind}?", "reference": "4", "tokens": 1,
                "text": f"{kind} at {version}", "characters": 9, "reward": rewards[place], "passed": rewards[place] == 1.0,
                "finish_reason": "stop",
            }
            for index, (kind, rewards) in enumerate(kinds.items())
        ]  # fmt: skip
        with (folder / EVAL_FILE).open("a") as file:
            file.write(json.dumps(eval_line(report)) + "\n")
        with (folder / SAMPLES_FILE).open("a") as file:
            file.write(json.dumps({"policy_version": version, "time": 1.0, "samples": samples}) + "\n")


def test_the_page_says_first_whether_the_model_got_better_and_then_what_it_said_before_and_says_now(var_dir: Path) -> None:
    answered(var_dir / "runs" / "first" / "alpha")
    shown = Dashboard("", "--run", "first", var_dir=var_dir)
    try:
        shown.until(lambda found: bool(found.get("leaderboard")), "its score")
        with a_browser() as browser:
            looker = Looker(browser)
            looker.page.set_viewport_size({"width": 1280, "height": 800})
            page = looker.open(shown.url)
            assert page.locator("main h1").inner_text() == "Your model got better"
            assert "166 of 200 held-out questions right, 102 more" in page.locator(".lead p").first.inner_text()
            for part in ("h1", ".lead b", "#answer .chart >> nth=0", ".figures", ".trained"):
                box = page.locator(f"main {part}").first.bounding_box()
                assert box is not None and box["y"] + box["height"] <= 800, f"{part} is seen without scrolling"
            rows = [row.inner_text().split("\t") for row in page.locator(".figures tbody tr").all()]
            assert rows[:3] == [["At the end", "0.830", "0.772 to 0.876"], ["Best step 67", "0.830", "the newest"],
                                ["Before", "0.320", "0.259 to 0.388"]]  # fmt: skip
            assert rows[3][:2] == ["Gain", "+0.510"]
            sections = [each.get_attribute("id") for each in page.locator("main > section").all()]
            assert sections == ["answer", "home", "says", "texts", "nodes"], "one node: nobody to compare with or to learn from"
            assert "signed" not in page.locator("main").inner_text(), "whose word it is matters on a hub only"
            kinds = [
                [cell.get_attribute("class") for cell in row.locator(".verdict").all()]
                for row in page.locator(".qa tbody tr").all()
            ]
            right, wrong, part = "verdict right", "verdict wrong", "verdict part"
            assert kinds == [[right, right], [wrong, right], [wrong, part], [right, wrong]]
            marks = page.locator(".qa tbody tr").nth(1).locator(".m").all_inner_texts()
            assert marks == ["✗", "✓"], "right and wrong have a mark besides their colour"
            assert page.locator(".qa tbody tr").nth(1).locator(".say").all_inner_texts() == ["learnt at 0", "learnt at 67", "4"]
            assert [int(each.split()[-1]) for each in page.locator(".counts button").all_inner_texts()] == [4, 1, 1, 1, 1]
            page.locator("#questions-lost").click()
            playwright.expect(page.locator(".qa tbody tr")).to_have_count(1, timeout=WAIT_MS)
            assert "lost at 67" in page.locator(".qa tbody").inner_text()
            assert page.evaluate("document.activeElement.id") == "questions-lost"
            commands = page.locator("#home code").all_inner_texts()
            assert any(each.startswith("swarm model export first alpha ") for each in commands)
            looker.check()
            looker.close()
    finally:
        shown.close()

"""The page of an ended run in a real browser, from its records alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.generator.evaluation import eval_line
from services.trainer.records import batch_line, trained_line
from shared.contracts.control import EvalReport
from shared.paired import ANSWERS_FIELD
from shared.run_records import BATCHES_FILE, EVAL_FILE, EVAL_SETS_FILE, METRICS_FILE, SAMPLES_FILE, TRAINED_FILE
from swarm_cli.runs import RunNote, StartOptions, write_end, write_note
from tests.integration.page_looker import AXE, LOOKS, OTHER_LOOKS, WAIT_MS, Looker, a_browser
from tests.integration.page_swarm import Dashboard, batch_of, group, trained_on

playwright = pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra `test`")
GONE = "ab" * 32
"""A group of step 9, which only the trainer's record still has."""


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
            page.get_by_text("do not hold step 9").wait_for()
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
            right = range(64) if version == 0 else range(2, 168)
            answers = [[float(each in right), each in right] for each in range(200)]
            file.write(json.dumps({**eval_line(report), ANSWERS_FIELD: answers}) + "\n")
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
            told = page.locator(".lead p").first.inner_text()
            assert "166 of 200 held-out questions right, 102 more" in told and "(104 newly right, 2 lost)" in told
            for part in ("h1", ".lead b", "#answer .chart >> nth=0", ".figures", ".trained"):
                box = page.locator(f"main {part}").first.bounding_box()
                assert box is not None and box["y"] + box["height"] <= 800, f"{part} is seen without scrolling"
            rows = [row.inner_text().split("\t") for row in page.locator(".figures tbody tr").all()]
            assert rows[:3] == [["At the end", "0.830", "0.772 to 0.876"], ["Best step 67", "0.830", "the newest"],
                                ["Before", "0.320", "0.259 to 0.388"]]  # fmt: skip
            assert rows[3][:2] == ["Gain", "+0.510"]
            sections = [each.get_attribute("id") for each in page.locator("main > section").all()]
            assert sections == ["answer", "home", "says", "texts", "nodes"], "one node: nobody to compare with or to learn from"
            assert page.locator("#by-step").count() == 0, "two steps are no curve"
            assert "signed" not in page.locator("main").inner_text(), "whose word it is matters on a hub only"
            kinds = [
                [cell.get_attribute("class") for cell in row.locator(".verdict").all()]
                for row in page.locator(".qa tbody tr").all()
            ]
            right, wrong, part = "verdict right", "verdict wrong", "verdict part"
            assert kinds == [[wrong, right], [right, wrong], [right, right], [wrong, part]], "what has changed comes first"
            marks = page.locator(".qa tbody tr").nth(0).locator(".m").all_inner_texts()
            assert marks == ["✗", "✓"], "right and wrong have a mark besides their colour"
            assert page.locator(".qa tbody tr").nth(0).locator(".say").all_inner_texts() == ["learnt at 0", "learnt at 67", "4"]
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


def test_answer_length_and_each_of_several_rewards_are_curves_beside_the_training_reward(var_dir: Path) -> None:
    file = var_dir / "runs" / "first" / "alpha" / METRICS_FILE
    lines = list(map(json.loads, file.read_text().splitlines()))
    for line in lines:
        part = line["step"] / 67
        line |= {"answer_tokens": 40 + 60 * part, "cut_off_share": part / 2}
        line |= {"reward_parts": {"accuracy": 0.1 + part / 10, "<b>format</b>_of_the_whole_answer": part, "length": -part}}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = Dashboard("", "--run", "first", var_dir=var_dir)
    try:
        shown.until(lambda found: found["state"] == "ended" and bool(found["batches"]), "its batches read")
        with a_browser() as browser:
            for width, scheme in (*LOOKS, *OTHER_LOOKS):
                looker = Looker(browser, width, scheme)
                page = looker.open(shown.url)
                rows = page.locator("#by-step tbody tr")
                rows.first.wait_for()
                told = [[cell.inner_text() for cell in row.locator("th, td.n").all()] for row in rows.all()]
                assert told == [
                    ["answer length", "44.5", "96.4"], ["cut off", "4 %", "47 %"], ["accuracy", "0.11", "0.19"],
                    ["<b>format</b>_of_the_whole_answer", "0.07", "0.94"], ["length", "-0.07", "-0.94"],
                ]  # fmt: skip
                assert len((rows.nth(3).locator("polyline").get_attribute("points") or "").split()) == 67
                looker.check()
                looker.shot(f"lengths-{width}-{scheme}")
                if (width, scheme) in LOOKS:
                    page = looker.open(shown.url + "#/node/alpha")
                    page.locator("#lengths .chart").first.wait_for()
                    assert page.locator("#rewards .legend li").count() == 3
                    looker.check()
                    looker.shot(f"lengths-node-{width}-{scheme}")
                looker.close()
    finally:
        shown.close()


def measured(folder: Path) -> None:
    """Results on four sets: with pass@k over the run, of the base policy only, a mean reward of a
    set that was added later, and one answer to each question.
    """
    lines: list[dict[str, Any]] = []

    def result(name: str, version: int, score: float, k: int, passed: float | None, **more: Any) -> None:
        by_reward = more.pop("by_reward", False)
        rate = {
            "pass_rate": None if by_reward else score,
            "mean_reward": score,
            "pass_at": {} if passed is None else {str(k): passed},
        }
        about = {
            "k": k,
            "questions": 200,
            "temperature": 1.0,
            "n": 200 * k,
            "error": 0.03,
            "held_out": "ab" * 32,
            "scorer": "cd" * 32,
        }
        lines.append({"set": name, "policy_version": version, **about, **rate, **more})

    for version, score in ((0, 0.21), (20, 0.3), (40, 0.38), (67, 0.46)):
        result("math500", version, score, 4, score + 0.2)
        result(
            "added-later-with-a-long-name-that-wraps-somewhere-on-phones", version, 3 * score, 2, None, by_reward=True, added_at=20
        )
    result("only-the-base", 0, 0.12, 8, 0.55)
    result("one-answer", 0, 0.05, 1, 0.05)
    result("one-answer", 67, 0.055, 1, 0.055)
    (folder / EVAL_SETS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_evaluation_sets_are_drawn_with_the_base_policy_and_a_change_of_the_reward_parts_its_mean(var_dir: Path) -> None:
    folder = var_dir / "runs" / "first" / "alpha"
    answered(folder)
    measured(folder)
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    changed = [{**line, "scorer": ("1" if line["step"] < 60 else "2") * 64, "reward_local": line["step"] / 100} for line in lines]
    (folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in changed))
    samples = (folder / SAMPLES_FILE).read_text()
    parts = {"accuracy": 0.2, "format": None}
    samples = samples.replace('"reward": 0.2,', f'"reward": 0.2, "parts": {json.dumps(parts)},')
    bonus = '"reward": 0.1, "parts": {"accuracy": 0.0, "short": 1.0},'
    (folder / SAMPLES_FILE).write_text(samples.replace('"reward": 0.0,', bonus, 1))
    shown = Dashboard("", "--run", "first", var_dir=var_dir)
    try:
        shown.until(lambda found: bool(found.get("leaderboard")), "its score")
        with a_browser() as browser:
            for width, scheme in [*LOOKS, *OTHER_LOOKS]:
                looker = Looker(browser, width, scheme)
                page = looker.open(shown.url)
                page.locator("#sets .chart").nth(3).wait_for()
                looker.check()
                if AXE.exists():
                    assert looker.axe() == []
                looker.shot(f"sets-{width}-{scheme}")
                looker.close()
            looker = Looker(browser)
            page = looker.open(shown.url)
            later, math500, one, base = page.locator("#sets figure").all()
            rows = [row.inner_text().split("\t") for row in math500.locator("tbody tr").all()]
            assert rows == [["At the end", "0.460", "0.660"], ["Before", "0.210", "0.410"], ["Gain", "+0.250", "+0.250"]]
            assert math500.locator(".base").count() == 1 and math500.locator(".most").count() == 1
            assert "added at step 20" in later.inner_text() and later.locator(".most").count() == 0
            assert [row.inner_text().split("\t")[0] for row in base.locator("tbody tr").all()] == ["Before"]
            assert base.locator(".whisker").count() == 1 and base.locator(".odot").count() == 1
            assert "share right" in one.inner_text() and "@1" not in one.inner_text()
            assert page.locator(".trained polyline").count() == 2, "the mean does not go over the change"
            assert page.locator(".trained b").inner_text() == "0.64", "of the steps from 60 on"
            assert "before step 60" in page.locator(".trained").inner_text()
            told = page.locator(".qa .verdict.part small").inner_text()
            assert "accuracy 0.20" in told and "format does not apply" in told
            assert "wrong; 0.1 of short" in page.locator(".qa .verdict.wrong small").inner_text(), (
                "a bonus is no part of being right"
            )
            looker.check()
            looker.close()
    finally:
        shown.close()

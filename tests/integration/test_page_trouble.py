"""The page while something is wrong: what it says of a server that does not answer, and of a
process that is late or gone.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from swarm_cli.local.control import holding_run
from swarm_cli.runs import LOCK, RunNote, StartOptions, write_note
from tests.integration.page_looker import AXE, LOOKS, ROOT, WAIT_MS, Looker, written
from tests.integration.page_swarm import Dashboard, PageSwarm
from tests.nats_server import NatsServer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra `test`")
LATE = {
    "state": "running",
    "server": "nats://127.0.0.1:4222",
    "nodes": [
        {"node": "alpha", "kind": "running", "trouble": "unanswered", "words": "verifier not answering for 14s", "away": []},
        {"node": "beta", "kind": "running", "trouble": "still", "words": "no step for 1m", "away": []},
        {"node": "gamma", "kind": "running", "trouble": "", "words": "training", "away": []},
    ],
}
AS_IF = """async (state) => {
  const told = { ...await get("swarm.json"), state };
  place([banner(told), answerSection(told, focus(told, ""), null), nodesSection(told)], false);
}"""
PAGE = ROOT / "swarm_cli" / "dashboard" / "page"
QUIET_END = {
    "state": "ended",
    "at": 1000.0,
    "now": 1060.0,
    "ended": {"in_order": True, "at": 1000.0, "words": "run first ended", "next": [["continues training", "swarm up --run first"]]},
}
"""What the dashboard tells of an ended run without records."""
SEEN_END = {
    **QUIET_END,
    "leaderboard": [
        {"node": "alpha", "key": "", "standing": "on record", "trusted": True, "set": "ab", "n": 16, "unknown": 9,
         "by_reward": False, "base": None, "newest": 0.5, "gain": None, "version": 3, "curve": [[3, 0.5, 7]], "best": [3, 0.5, 7],
         "mean": 0.5, "outcome": "unknown", "words": "held-out tasks were not evaluated before and after", "chance": None},
    ],
}  # fmt: skip
SHOWN = "told => document.querySelector('main').replaceChildren(banner(told), el('h1', { text: 'Seen' }))"


def test_while_the_server_is_lost_or_stores_nothing_the_page_says_nothing_reassuring(
    browser: Any, server: NatsServer, tmp_path: Path
) -> None:
    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await swarm.node("alpha")
        await swarm.transport.close()

    written(write())
    shown = Dashboard(server.url, var_dir=tmp_path)
    try:
        shown.until_state("running")
        looker = Looker(browser)
        page = looker.open(shown.url)
        page.locator("#fold > summary").click()
        alpha = page.locator("#nodes tbody tr", has_text="alpha")
        playwright.expect(alpha).to_contain_text("● running", timeout=WAIT_MS)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            shown.until_state("lost")
            page.get_by_text("The server does not answer.").wait_for(timeout=WAIT_MS)
            for state in ("unstored", ""):
                assert "● running" not in (told := alpha.inner_text()) and "seen last: running" in told, told
                looker.check()
                page.evaluate("clearTimeout(timer), void round++")  # no look replaces what follows
                page.evaluate(AS_IF, state or "lost")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        looker.close()
    finally:
        shown.close()


def test_a_silent_process_of_a_run_on_this_machine_has_its_restart_and_its_log_named_and_a_late_one_is_no_alarm(
    browser: Any, server: NatsServer, tmp_path: Path
) -> None:
    folder = tmp_path / "var" / "runs" / "one"
    log = folder / "alpha" / "verifier.log"

    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await swarm.node("alpha", age_s=100.0)
        await swarm.transport.close()

    written(write())
    with holding_run(folder):
        os.utime(folder / LOCK, (time.time() - 300, time.time() - 300))  # it was started before the last words
        write_note(folder, RunNote(server.url, server.url, StartOptions(), "first", str(tmp_path)))
        log.parent.mkdir()
        log.touch()
        shown = Dashboard("", var_dir=tmp_path / "var")
        try:
            shown.until_state("failed")
            for width, scheme in LOOKS:
                looker = Looker(browser, width, scheme)
                page = looker.open(shown.url)
                banner = page.locator(".banner")
                banner.get_by_text("swarm restart alpha-verifier").wait_for()
                assert banner.locator("code").all_inner_texts()[:3] == ["swarm restart alpha-verifier", "--now", str(log)]
                assert "kubectl" not in banner.inner_text()
                looker.check()
                page.evaluate("clearTimeout(timer), void round++")  # no look replaces what follows
                page.evaluate(SHOWN, LATE)
                assert banner.get_attribute("class") == "banner warn"
                page.get_by_text("A process does not answer.").wait_for()
                assert banner.locator("p").nth(1).inner_text() == "alpha: verifier not answering for 14s"
                page.evaluate(SHOWN, {**LATE, "nodes": LATE["nodes"][1:]})
                page.get_by_text("A node stands still.").wait_for()
                page.evaluate(SHOWN, {**LATE, "nodes": [{**LATE["nodes"][1], "trouble": "unscored"}]})  # type: ignore[dict-item]
                page.get_by_text("No group is scored.").wait_for()
                away = [{"process": "alpha-verifier", "log": ""}]
                gone = {"node": "alpha", "kind": "silent", "trouble": "", "words": "no word from verifier for 60 s", "away": away}
                page.evaluate(SHOWN, {**LATE, "state": "failed", "cluster": True, "nodes": [gone]})
                assert banner.locator("code").all_inner_texts() == [
                    "kubectl -n swarm logs -l app.kubernetes.io/component=verifier,swarm-rl.dev/node=alpha"
                ]
                looker.check()
                assert not AXE.exists() or looker.axe() == []
                looker.close()
        finally:
            shown.close()


@pytest.mark.slow
def test_only_an_answer_that_does_not_come_is_a_dashboard_that_does_not_answer(browser: Any) -> None:
    told: dict[str, Any] | None = QUIET_END

    def answer(route: Any) -> None:
        name = route.request.url.rpartition("/")[2] or "index.html"
        if name.startswith("node.json"):
            route.fulfill(status=404, json={"problem": "no node alpha"})
        elif name != "swarm.json":
            route.fulfill(path=PAGE / name)
        elif told is None:
            route.abort()
        else:
            route.fulfill(json=told)

    looker = Looker(browser, allowed="404")
    page = looker.page
    page.route("http://127.0.0.1:9/**", answer)
    try:
        looker.open("http://127.0.0.1:9/")
        assert page.locator("#home code").all_inner_texts() == ["swarm up --run first"]
        looker.check()
        told = SEEN_END
        page.evaluate("show()")
        page.locator("#answer").get_by_text("7 of 16 held-out answers; 9 have no known reward").wait_for()
        assert page.locator("#leaderboard, #exchange").count() == 0, "one node has no leaderboard, and nobody taught it"
        assert " yet" not in page.locator("main").inner_text(), "nothing more comes of a run that has ended"
        looker.check()
        row = {**SEEN_END["leaderboard"][0], "unknown": 0, "version": 0, "base": 0.5, "curve": [[0, 0.5, 16]], "best": [0, 0.5, 16]}
        told = {**SEEN_END, "leaderboard": [row]}
        page.evaluate("show()")
        page.get_by_role("heading", name="Nothing was evaluated after step 0").wait_for()
        page.get_by_text("To evaluate the newest checkpoint: swarm eval").wait_for()
        steps = page.locator("#answer .chart").first.locator("text[y='215']").all_text_contents()
        assert steps == ["step 0", "1"], "steps are whole numbers"
        looker.check()
        told = {**QUIET_END, "state": "running"}  # without nodes: no dashboard tells that, so the page fails
        page.evaluate("show()")
        assert page.locator("#problem h1").inner_text() == "! This page has an error"
        assert "undefined" in page.locator("#problem").inner_text()
        assert any("TypeError" in problem for problem in looker.problems), "the browser's console has the place"
        told = None
        page.evaluate("show()")
        assert page.locator("#problem h1").inner_text() == "! The dashboard does not answer"
    finally:
        page.unroute("http://127.0.0.1:9/**")
        looker.close()

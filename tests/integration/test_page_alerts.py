"""The page while something is wrong: where an alert's card leads, what the banner says of a process
that is late or gone, and how many processes answer.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from swarm_cli.local.control import holding_run
from swarm_cli.local.run_note import write_note
from swarm_cli.running import RunNote
from tests.integration.page_alert import ALERT, page_with_alert, page_with_processes
from tests.integration.page_looker import AXE, LOOKS, WAIT_MS, Looker, written
from tests.integration.page_swarm import Dashboard, PageSwarm
from tests.nats_server import NatsServer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra `test`")
PROMETHEUS = shutil.which("prometheus") is not None
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
  const told = await get("swarm.json");
  place([banner({ ...told, state }), await alertsSection(true, true), nodesSection({ ...told, state })], false);
}"""
SHOWN = "told => document.querySelector('main').replaceChildren(banner(told))"


@pytest.mark.skipif(not PROMETHEUS, reason="no prometheus on the PATH (Debian's package prometheus)")
def test_an_alerts_card_leads_to_its_runbook_its_node_and_its_panels(browser: Any, server: NatsServer, tmp_path: Path) -> None:
    with page_with_alert(server, tmp_path) as shown:
        for width, scheme in LOOKS:
            looker = Looker(browser, width, scheme)
            page = looker.open(shown.url)
            card = page.locator("#alerts li.alert", has_text=ALERT)
            said = page.locator("#alerts > p")
            playwright.expect(said).to_contain_text("1 of 4 processes answer; not alpha", timeout=WAIT_MS)
            panels = card.get_by_role("link", name="Panels")
            assert panels.get_attribute("href") == "panels#dashboard=swarm-node&node=alpha"
            looker.check()
            assert not AXE.exists() or looker.axe() == []
            card.get_by_role("link", name="Node alpha").click()
            page.get_by_role("heading", name="alpha", exact=True).wait_for()
            page.goto(shown.url)
            page.locator("#alerts li.alert", has_text=ALERT).get_by_role("link", name="Runbook").click()
            page.get_by_role("heading", name="SwarmPolicyDiverges").wait_for()
            page.get_by_role("heading", name="On one machine").wait_for()
            looker.check()
            assert not AXE.exists() or looker.axe() == []
            page.goto(f"{shown.url}#/runbook/SwarmTrainerStalled")
            page.get_by_role("link", name="SwarmGeneratorStalled").first.wait_for()
            looker.check()
            looker.shot(f"runbook-{width}-{scheme}")
            page.goto(f"{shown.url}panels#dashboard=swarm-node&node=alpha")
            link = page.locator("#alerts .alert.firing", has_text=ALERT).get_by_role("link", name="runbook")
            assert link.get_attribute("href") == "/#/runbook/SwarmPolicyDiverges"
            page.get_by_role("button", name="Swarm", exact=True).click()
            page.get_by_role("columnheader", name="steps, 5 min").wait_for()
            curve = page.locator("article.panel h3", has_text="Trainer steps")
            curve.scroll_into_view_if_needed()  # it is drawn when it is seen
            playwright.expect(curve).to_have_text("Trainer steps over 15 s", timeout=WAIT_MS)
            looker.check()
            looker.close()


@pytest.mark.skipif(not PROMETHEUS, reason="no prometheus on the PATH (Debian's package prometheus)")
def test_while_the_server_is_lost_or_stores_nothing_the_page_says_nothing_reassuring(
    browser: Any, server: NatsServer, tmp_path: Path
) -> None:
    with page_with_processes(server, tmp_path) as shown:
        looker = Looker(browser)
        page = looker.open(shown.url)
        alerts, alpha = page.locator("#alerts > p"), page.locator("#nodes tbody tr", has_text="alpha")
        playwright.expect(alerts).to_have_text("No alert fires. All 4 processes answer.", timeout=WAIT_MS)
        playwright.expect(alpha).to_contain_text("● running", timeout=WAIT_MS)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            shown.until_state("lost")
            page.get_by_role("heading", name="The server does not answer").wait_for(timeout=WAIT_MS)
            for state in ("unstored", ""):
                assert "processes answer" not in (told := alerts.inner_text()) and "No alert fires." not in told, told
                assert alerts.get_attribute("class") == "warn"
                assert "● running" not in (told := alpha.inner_text()) and "seen last: running" in told, told
                looker.check()
                page.evaluate("clearTimeout(timer), void round++")  # no look replaces what follows
                page.evaluate(AS_IF, state or "lost")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        looker.close()


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
        write_note(folder, RunNote(server.url, server.url, "swarm up --run one", "first", str(tmp_path)))
        log.parent.mkdir()
        log.touch()
        shown = Dashboard("", tmp_path, var_dir=tmp_path / "var")
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
                page.get_by_role("heading", name="Running, but a process does not answer").wait_for()
                assert banner.locator("p").nth(1).inner_text() == "alpha: verifier not answering for 14s"
                page.evaluate(SHOWN, {**LATE, "nodes": LATE["nodes"][1:]})
                page.get_by_role("heading", name="Running, but a node stands still").wait_for()
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

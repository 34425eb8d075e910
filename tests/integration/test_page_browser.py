"""The swarm's page in a real browser, over a real NATS server: every state in both widths and both
schemes, hostile text, the keyboard, what axe finds, and a swarm of a hundred nodes.

Screenshots stay in `build/page`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import NodeRecord
from shared.contracts.wire import ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import sign_statement
from tests.integration.page_looker import AXE, LOOKS, OTHER_LOOKS, WAIT_MS, Looker, written
from tests.integration.page_swarm import SWARM, Dashboard, PageSwarm, a_hundred, group, publish_raw, usual
from tests.nats_server import NatsServer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra `test`")
HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "javascript:window.hacked=1",
    "\u202egnp.exe \u200b\x1b[31m\x00",
    "é" + "\u0301" * 300,
    "W" * 5000,
    "‮" * 40 + "</pre></main><h1>Finished</h1>",
)


def every_look(browser: Any, url: str, name: str, wanted: str, *, allowed: str = "") -> None:
    """The page in both widths and both schemes: it says `wanted`, and axe finds nothing. What most
    people see has all four together.
    """
    for width, scheme in [*LOOKS, *(OTHER_LOOKS if name == "running" else [])]:
        looker = Looker(browser, width, scheme, allowed)
        page = looker.open(url)
        page.get_by_text(wanted).first.wait_for()
        looker.check()
        if AXE.exists():
            assert looker.axe() == [], f"{name} at {width} px, {scheme}"
        looker.shot(f"{name}-{width}-{scheme}")
        looker.close()


def test_every_state_of_a_swarm_is_shown_and_can_be_used_in_each_width_and_scheme(browser: Any, tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    shown = Dashboard(server.url, var_dir=tmp_path)
    keys: dict[str, SigningKey] = {}

    async def write(what: str) -> None:
        swarm = await PageSwarm.open(server.url, tmp_path / "runs" / "dev")
        swarm.keys = keys
        if what == "starting":
            await swarm.node("alpha", step=0, state="starting")
        elif what == "running":
            await usual(swarm)
        else:
            for node in ("alpha", "beta"):
                state, age_s = "stopped" if what == "stopped" else "working", 100.0 if what == "failed" else 0.0
                await swarm.node(node, state=state, finished=what == "finished", age_s=age_s)
        await swarm.transport.close()

    try:
        shown.until_state("waiting")
        every_look(browser, shown.url, "waiting", "No server answers there yet")
        server.start()
        shown.until_state("empty")
        every_look(browser, shown.url, "empty", "no node has written to it")
        for state, words in (
            ("starting", "evaluating the base policy before the first step"),
            ("running", "All 3 models are getting better"),
            ("failed", "fell silent"),
            ("stopped", "All 3 models got better"),
            ("finished", "all steps taken"),
        ):
            written(write(state))
            shown.until_state(state)
            every_look(browser, shown.url, state, words)
            if state == "failed":
                looker = Looker(browser)
                told = looker.open(shown.url).locator(".banner p").nth(1)
                playwright.expect(looker.page.locator("main h1")).to_contain_text("has stopped at step 7")
                # The page may have seen alpha's state before beta's.
                playwright.expect(told).to_contain_text("; beta: no word from ", timeout=WAIT_MS)
                assert told.inner_text().startswith("alpha: no word from generator, "), told.inner_text()
                looker.close()
        for name, address, words in (
            ("group", "#/group/alpha/1/0", "4 completions"),
            ("step", "#/step/alpha/1", "group"),
            ("node", "#/node/alpha", "Held-out pass rate by task"),
            ("not-found", "#/step/alpha/999", "does not hold step 999"),
            ("no-node", "#/node/zeta", "no node zeta"),
        ):
            every_look(browser, shown.url + address, name, words, allowed="404" if words.startswith(("does not", "no ")) else "")
        server.stop()
        lost = shown.until(lambda found: found["state"] == "lost" and "`swarm up`" in found["problem"], "lost, with a remedy")
        assert lost["leaderboard"], "what was known stays"
        every_look(browser, shown.url, "lost", "The page shows what was seen last")
        looker = Looker(browser)
        codes = looker.open(shown.url).locator(".banner code")
        assert "swarm up" in codes.all_inner_texts(), "a command is shown as one"
        looker.close()
    finally:
        server.stop()
        shown.close()


def test_the_keyboard_reaches_everything_and_a_step_leads_to_its_groups(browser: Any, server: NatsServer, tmp_path: Path) -> None:
    async def write() -> None:
        swarm = await PageSwarm.open(server.url, tmp_path / "runs" / "dev")
        await usual(swarm)
        await swarm.transport.close()

    written(write())
    shown = Dashboard(server.url, var_dir=tmp_path)
    looker = Looker(browser)
    try:
        shown.until_state("running")
        page = looker.open(shown.url)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        cells = page.locator("#exchange tbody tr").first.locator("td")
        assert cells.all_inner_texts() == ["6 local", "6", "2"]
        page.locator("#dataset").focus()
        page.keyboard.type("gcd")
        playwright.expect(page.locator("#exchange tbody tr").first.locator("td").nth(1)).to_have_text("0", timeout=WAIT_MS)
        assert page.evaluate("document.activeElement.id") == "dataset", "the focus outlives the new table"
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert outline == "3px", "the focus is seen"

        page.goto(shown.url + "#/node/alpha")
        page.locator("#steps a").first.focus()
        page.keyboard.press("Enter")
        # The address changes before the page does, and the node's page has a link of the same name.
        page.get_by_role("heading", name="Step 1 of alpha").wait_for()
        assert page.url.endswith("#/step/alpha/1")
        page.get_by_role("link", name="Find the greatest common divisor").first.press("Enter")
        page.get_by_role("heading", name="Group 0 of step 1").wait_for()
        page.go_back()
        page.locator("li.card").first.click(position={"x": 3, "y": 3})  # a card is a link as a whole
        page.get_by_role("heading", name="Group 0 of step 1").wait_for()
        # Question, completions and what each earned; the tokens' text is the completion's.
        assert page.locator("article pre").all_inner_texts() == ["6", "12", "8", "6 is it, surely"]
        assert page.locator("article h3 + p").first.inner_text().startswith("✓ reward 1.00 · 1 token")
        assert page.locator("article h3 + p + p").first.inner_text() == "judged: the whole text"
        assert page.locator("dl div", has_text="Judged by").inner_text().split()[:4] == ["Judged", "by", "reasoning_gym", "(by"]
        assert page.locator("article .token").first.get_attribute("title") == "logprob -0.020, probability 0.98"
        page.get_by_text("Tokens as a table").last.click()
        page.get_by_role("cell", name="-1.500").nth(1).wait_for()
        assert page.get_by_role("cell", name="-1.500").count() == 2
        page.goto(shown.url + "#/group/alpha/2/1")
        page.get_by_text("did not share token ids and logprobs").wait_for()
        looker.check()
        page.get_by_role("link", name="This run").click()
        page.locator("#leaderboard").wait_for()
        assert looker.problems == []
    finally:
        looker.close()
        shown.close()


def test_who_learns_from_whom_says_what_is_not_counted_and_that_no_step_was_taken(
    browser: Any, server: NatsServer, tmp_path: Path
) -> None:
    async def write(step: int) -> None:
        swarm = await PageSwarm.open(server.url, tmp_path / "runs" / "dev")
        for name in ("alpha", "beta"):
            await swarm.node(name, step=step)
        await swarm.node("gamma", here=False)
        for number in range(step):
            await swarm.batch("alpha", group("alpha", "alpha", f"What is {number}?", [("0", 1.0)]))
        if step:
            await swarm.batch("alpha", group("alpha", "alpha", "What comes next?", [("0", 1.0)]))
        await swarm.transport.close()

    written(write(0))
    shown = Dashboard(server.url, var_dir=tmp_path)
    looker = Looker(browser)
    try:
        shown.until_state("starting")
        section = looker.open(shown.url).locator("#exchange")
        section.get_by_text("No group was trained on yet").wait_for()
        records = tmp_path / "runs" / "dev" / "alpha" / "metrics.jsonl"
        records.parent.mkdir(parents=True)
        lines = [{"step": 1, "updated": True}, {"step": 2, "updated": True, "trained_of": {"beta": {"gcd": 3}}}]
        records.write_text("".join(json.dumps(line) + "\n" for line in lines))
        written(write(2))
        section.get_by_text("The trainers' records do not tell of earlier steps. Counted: alpha from step 2 on.").wait_for()
        section.get_by_text("Not counted, as their trainers' records are not on this machine: beta.").wait_for()
        assert section.locator("tbody tr").all_inner_texts() == ["alpha\t3"]
        waiting = looker.page.locator("#texts li", has_text="not trained on yet")
        playwright.expect(waiting.locator("a")).to_have_text(["What comes next?"], timeout=WAIT_MS)
        looker.check()
    finally:
        looker.close()
        shown.close()


@pytest.mark.parametrize("differs", [False, True], ids=["same", "changed"])
def test_a_click_during_which_the_page_is_refreshed_is_followed(
    differs: bool, browser: Any, server: NatsServer, tmp_path: Path
) -> None:
    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await usual(swarm)
        await swarm.transport.close()

    written(write())
    shown = Dashboard(server.url)
    looker = Looker(browser)
    try:
        shown.until_state("running")
        page = looker.open(shown.url)
        if differs:
            page.evaluate("document.querySelector('#nodes').append('what the next refresh replaces')")
        page.locator("#fold > summary").click()
        page.locator("#nodes").get_by_role("link", name="alpha").hover()
        page.mouse.down()
        with page.expect_response("**/swarm.json*"):
            page.evaluate("void show()")
        page.wait_for_timeout(500)
        page.mouse.up()
        page.get_by_role("heading", name="Reward by step").wait_for()
        assert page.url.startswith(shown.url + "#/node/alpha")
        page.get_by_role("link", name="This run").click()
        page.get_by_role("heading", name="All 3 models are getting better").wait_for()
        assert "what the next refresh replaces" not in page.locator("#nodes").inner_text()
        looker.check()
    finally:
        looker.close()
        shown.close()


def test_scores_are_ranked_on_the_same_tasks_and_by_signature_and_hostile_text_is_text(
    browser: Any, server: NatsServer, tmp_path: Path
) -> None:
    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await usual(swarm, steps=1)
        await swarm.node("delta", here=False)
        for version, rate in ((0, 0.5), (25, 0.99)):
            await swarm.score(swarm.report("delta", version, rate, held_out="cd" * 32))
        await swarm.score(swarm.report("alpha", 900, 1.0), SigningKey(new_seed()))
        unsigned = swarm.report("epsilon", 30, 0.98)
        await swarm.score(unsigned, payload=encode(unsigned))
        key = swarm.key("evil")
        hostile = NodeRecord(
            node="evil",
            public_key=key.public_key,
            model=ModelIdentity(name=HOSTILE[1] + "x" * 400, tokenizer_hash="a" * 64),
            tasks=[f"t{number}_" + "y" * 50 for number in range(1000)],
            policy_version=2**62,
            software=HOSTILE[0],
            updated_at=1.0,
        )
        for name in ("evil", "e" * 32):
            entry = encode(sign_statement(hostile, key, SWARM))
            await publish_raw(server.url, f"$KV.{subjects.SWARM_NODES_BUCKET}.{name}", entry)
        answers = [(text, 0.5) for text in HOSTILE]
        for number, text in enumerate(HOSTILE):
            await swarm.batch("alpha", group("alpha", "e" * 32, text, answers, tokens=False, dataset="d" * 63, n=number))
        await swarm.transport.close()

    written(write())
    shown = Dashboard(server.url)
    try:
        shown.until_state("running")
        for width, scheme in ((1280, "light"), (390, "dark")):
            looker = Looker(browser, width, scheme)
            page = looker.open(shown.url)
            page.locator("#fold > summary").click()
            tables = page.locator("#leaderboard table")
            rows_of = [table.locator("tbody tr").all() for table in tables.all()]
            ranks = [[row.locator("th, td").all_inner_texts() for row in rows] for rows in rows_of]
            names = [[row[1].split()[0] for row in rows] for rows in ranks]
            assert names == [["alpha", "beta", "gamma"], ["delta"], ["epsilon"]]
            assert ranks[0][0][5] == "150", "another key's score under a known name counts for nothing"
            assert (ranks[2][0][0], ranks[2][0][7]) == ("–", "? unsigned"), "what is not known to be a node's word has no rank"
            assert "<img src=x" in page.locator("#nodes").inner_text()
            looker.check()
            looker.shot(f"hostile-{width}-{scheme}")
            for step in range(2, 9):
                looker.open(f"{shown.url}#/group/alpha/{step}/0")
                page.get_by_role("heading", name=f"step {step}").wait_for()
                looker.check()
            assert page.locator("main h1").count() == 1
            assert page.locator("article").count() == len(HOSTILE)
            assert "<script>window.hacked = 1</script>" in page.locator("main").inner_text()
            assert r"\u202e" in page.locator("main").inner_text(), "what turns text round is shown, not obeyed"
            looker.shot(f"hostile-group-{width}-{scheme}")
            looker.close()
    finally:
        shown.close()


def test_a_swarm_of_a_hundred_nodes_fits_in_300_kilobytes(browser: Any, server: NatsServer, tmp_path: Path) -> None:

    async def write() -> None:
        swarm = await PageSwarm.open(server.url, tmp_path / "runs" / "dev")
        await a_hundred(swarm)
        await swarm.transport.close()

    written(write())
    shown = Dashboard(server.url, var_dir=tmp_path)
    looker = Looker(browser)
    try:
        shown.until_state("running")
        # By address: on a busy machine the page is refreshed before it is counted.
        sizes: dict[str, int] = {}
        looker.listen("response", lambda response: sizes.update({response.url: int(response.headers.get("content-length", "0"))}))
        page = looker.open(shown.url)
        assert 0 < sum(sizes.values()) < 300_000, sizes
        assert page.locator("#leaderboard tbody tr").count() == 100
        assert page.locator("#nodes tbody tr").count() == 100
        assert page.locator("#exchange thead th").count() == 1 + 24 + 1, "the most senders, and the others"
        looker.check()
        looker.shot("hundred-1280-light")
        looker.close()
        looker = Looker(browser, 390)
        looker.open(f"{shown.url}#/node/node-000-{'n' * 20}").locator("figure .legend li").nth(7).wait_for()
        looker.check()
    finally:
        looker.close()
        shown.close()

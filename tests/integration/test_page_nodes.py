"""The page in a browser: a node's page where there is no such node, and the tables of nodes on a
narrow screen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.page_looker import Looker, written
from tests.integration.page_swarm import Dashboard, PageSwarm, usual
from tests.nats_server import NatsServer

BOXES = """
document.querySelectorAll("#nodes td.words").forEach((td) => td.append(" and more words")),
[...document.querySelectorAll("#leaderboard tbody tr > *, #nodes tbody tr > *")].map((cell) => {
  const { left, right } = cell.getBoundingClientRect();
  return [cell.closest("section").id, cell.innerText, left, right];
})
"""
"""Section, words and sides of each cell, with words as long as they get on a busy machine. All at
once, as the page may draw its tables again at any time.
"""
BELOW = """
[...document.querySelectorAll("#leaderboard tbody tr")].map((row) => {
  const [node, gain] = [row.querySelector("th"), row.querySelectorAll("td")[1]].map((cell) => cell.getBoundingClientRect());
  return gain.top >= node.bottom;
})
"""


def test_a_node_that_nobody_has_heard_of_is_not_found(browser: Any, server: NatsServer, tmp_path: Path) -> None:
    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await usual(swarm, steps=1)
        await swarm.transport.close()

    written(write())
    shown = Dashboard(server.url)
    looker = Looker(browser, allowed="404")
    try:
        shown.until_state("running")
        page = looker.open(shown.url + "#/node/zeta")
        page.get_by_role("heading", name="Not found").wait_for()
        page.get_by_text("no node zeta: no process, directory entry, score or group of that name").wait_for()
        assert page.title() == "Not found · swarm"
        looker.check()
        page.get_by_role("link", name="To the swarm").click()
        page.get_by_role("heading", name="are getting better").wait_for()
        for node in ("alpha", "gamma"):
            page.goto(f"{shown.url}#/node/{node}")
            page.get_by_role("heading", name=node, exact=True).wait_for()
    finally:
        looker.close()
        shown.close()


def test_on_a_narrow_screen_all_of_the_leaderboard_and_of_the_nodes_is_in_sight(
    browser: Any, server: NatsServer, tmp_path: Path
) -> None:
    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await usual(swarm, steps=1)
        await swarm.node("n" * 32, here=False)
        await swarm.score(swarm.report("n" * 32, 25, 0.5))
        await swarm.score(swarm.report("o", 25, 0.5, held_out="cd" * 32))
        await swarm.transport.close()

    written(write())
    shown = Dashboard(server.url)
    try:
        shown.until_state("running")
        for width in (390, 1280):
            looker = Looker(browser, width)
            page = looker.open(shown.url)
            page.locator("#fold > summary").click()
            boxes = page.evaluate(BOXES)
            assert sum(of == "leaderboard" for of, *_ in boxes) == 5 * 8
            assert [words for _, words, left, right in boxes if left < 0 or right > width or left == right] == []
            below = page.evaluate(BELOW)
            assert below == [width == 390] * 5, "a row's facts are below its name"
            heads = page.evaluate(
                "[...document.querySelectorAll('#leaderboard tbody td')].map((td) => getComputedStyle(td, '::before').content)"
            )
            assert any("gain" in each for each in heads) == (width == 390), "a stacked fact has its column's name"
            looker.check()
            looker.close()
    finally:
        shown.close()

"""The tokens of a group's page in a real browser: by what they are coloured, and what marks them
besides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import structs

from services.trainer.records import trained_line
from shared.contracts.messages import ScoredGroup
from shared.run_records import TRAINED_FILE
from tests.integration.page_looker import AXE, LOOKS, OTHER_LOOKS, Looker, written
from tests.integration.page_swarm import Dashboard, PageSwarm, group
from tests.nats_server import NatsServer


def trained_on(var_dir: Path, scored: ScoredGroup, ratios: list[float | None], weights: list[float | None]) -> None:
    """Return what alpha's trainer wrote of a group of its first batch."""
    answers: list[dict[str, Any]] = []
    for place, completion in enumerate(scored.group.completions):
        measures = {"token_ratio": ratios, "token_weight": weights}
        each = {name: (values * completion.token_count)[: completion.token_count] for name, values in measures.items()}
        answers.append({"place": place, "advantage": 1.5, "tokens": completion.token_count, "weight": 0.8, "clipped": 1.0} | each)
    line = {"id": scored.group_id, "origin": "local", "sender": "alpha", "fate": "trained", "factor": 1.0, "answers": answers}
    record = var_dir / "runs" / "first" / "alpha" / TRAINED_FILE
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(trained_line(1, 1.0, updated=True, updates=1, groups=[line]) + "\n")


def test_tokens_are_coloured_by_logprob_ratio_or_weight_and_what_has_no_part_is_struck_through(
    browser: Any, server: NatsServer, tmp_path: Path
) -> None:
    answers = [("6", 1.0), ("6 is it, surely", 0.2), ("12 is what I would say, and not 6", 0.0)]
    asked = structs.replace(
        group("alpha", "alpha", "Find the greatest common divisor of 12 and 18.", answers),
        unknown={"raised": 3},
        parts={"rewards.py:right": [1.0, 0.0, 0.0], "rewards.py:short": [None, 0.2, 0.0]},
    )

    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await swarm.node("alpha", run="first")
        await swarm.batch("alpha", asked, group("alpha", "beta", "What is 2 * 3?", answers, n=1))
        await swarm.transport.close()

    written(write())
    # The fifth token's weight was cut below its ratio; of the seventh nothing is on record.
    ratios, weights = [0.3, 1.0, 0.7, 1.5, 2.5, 1.3, None], [0.3, 0.0, 0.7, 1.5, 1.0, 1.3, None]
    trained_on(tmp_path, asked, ratios, weights)
    shown = Dashboard(server.url, var_dir=tmp_path)
    wanted = {
        "logprob": ["heat-0", "heat-1", "heat-2", "heat-3", "heat-4", "heat-0", "heat-1"],
        "ratio": ["less-2", "heat-0", "less-1", "more-1", "more-2", "more-1", "unknown"],
        "weight": ["weight-1", "weight-0", "weight-2", "more-1", "heat-0 cut", "more-1", "unknown"],
    }
    try:
        shown.until_state("running")
        for width, scheme in (*LOOKS, *OTHER_LOOKS):
            looker = Looker(browser, width, scheme)
            page = looker.open(f"{shown.url}#/group/alpha/1/0")
            tokens = page.locator("article").nth(1).locator(".token")
            page.get_by_text("3 more left the group: raised 3").wait_for()
            page.locator("article").nth(0).get_by_text("rewards.py:short does not apply").wait_for()
            page.locator("article").nth(1).get_by_text("rewards.py:short 0.20").wait_for()
            page.get_by_role("radio", name="logprob").focus()
            for measure, marks in wanted.items():
                assert page.get_by_role("group", name="Colour tokens by").get_by_role("radio", name=measure).is_checked()
                found = [each.get_attribute("class") for each in tokens.all()][: len(marks)]
                assert found == [f"token {mark}" for mark in marks[: len(found)]], measure
                looker.check()
                assert not AXE.exists() or looker.axe() == [], f"{measure} at {width} px, {scheme}"
                looker.shot(f"heat-{measure}-{width}-{scheme}")
                page.keyboard.press("ArrowRight")
            page.get_by_role("radio", name="weight").check()
            assert tokens.nth(1).evaluate("token => getComputedStyle(token).textDecorationLine") == "line-through"
            assert tokens.nth(4).evaluate("token => getComputedStyle(token).borderBottomStyle") == "dashed"
            assert {"0: no part in the loss", "less than its ratio"} <= set(page.locator("#heat-legend .token").all_inner_texts())
            page.get_by_text("Tokens as a table").nth(1).click()
            page.get_by_role("cell", name="0.000, no part").wait_for()
            page.get_by_role("cell", name="1.000, cut").wait_for()
            page.get_by_role("link", name="group after").click()
            page.get_by_role("heading", name="Group 1 of step 1").wait_for()
            assert page.get_by_role("radio", name="weight (not on record)").is_disabled()
            assert page.get_by_role("radio", name="logprob").is_checked()
            looker.close()
    finally:
        shown.close()

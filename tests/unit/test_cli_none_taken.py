"""A node that used to take foreign groups and refuses all of them now is said to: in `swarm top`,
in the progress view, and on the page.
"""

from __future__ import annotations

import io

from prometheus_client import CollectorRegistry
from rich.console import Console

from services.verifier.figures import Figures
from services.verifier.refusals import Refusal, Refused
from shared.contracts.codec import decode, encode
from shared.contracts.control import ServiceStatus
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.runtime.status import StatusBoard
from shared.tasks.sandbox import JobResult
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.observe.progress import state
from swarm_cli.observe.snapshot import SwarmSnapshot
from swarm_cli.observe.status import show
from tests.unit.test_cli_top import NOW, model, node, shown

USED_UP = {"last_taken_at": NOW - 250, "last_refused_at": NOW - 2, "since_taken_refused": 900.0, "refused_repeated": 900.0}


def test_a_node_that_takes_no_more_is_told_in_a_panel_a_row_the_progress_view_and_on_the_page() -> None:
    dry = node(refused=12_345.0, **USED_UP)
    for width in (80, 160):
        panel = shown(model(dry), width=width)
        assert "taken in 800, none for 4m  refused 12,345: repeated" in panel and "…" not in panel
        row = next(line for line in shown(model(dry, node("beta")), width=width, height=6).splitlines() if line.startswith("alpha"))
        assert row.rstrip().endswith("none taken 4m") and "…" not in row, row
    assert state(dry.view, NOW) == "working, no foreign group taken for 4m"
    (seen,) = swarm_object(SwarmSnapshot(NOW, (dry,), (), True), [], RecentGroups())["nodes"]
    assert (seen["kind"], seen["words"]) == ("running", "working, no foreign group taken for 4m")


def test_nothing_is_told_of_a_node_that_takes_groups_is_sent_none_or_never_took_any() -> None:
    for figures in (
        {},
        USED_UP | {"last_taken_at": NOW - 100},
        USED_UP | {"last_refused_at": NOW - 100},
        USED_UP | {"since_taken_refused": 15.0},
        {name: value for name, value in USED_UP.items() if name != "last_taken_at"},
    ):
        assert "none for" not in shown(model(node(**figures))), figures
        assert state(node(**figures).view, NOW) == "working"


def test_a_verifier_counts_what_it_refuses_since_it_accepted_a_group() -> None:
    board = StatusBoard("alpha", "verifier", "0")
    border = Figures(CollectorRegistry(), board, ["gcd"]).border
    refused = Refused(Refusal.REPEATED, "beta", "")
    border.refused(refused)
    assert StatusFigure.TAKEN_AT not in board.snapshot().figures
    border.accepted("gcd", JobResult([1.0], None, None, "", 0, 0.1))
    assert board.get(StatusFigure.REFUSED_SINCE_TAKEN) == 0
    border.refused(refused)
    border.refused(refused)
    assert board.get(StatusFigure.REFUSED_SINCE_TAKEN) == 2
    assert 0 < board.get(StatusFigure.TAKEN_AT) <= board.get(StatusFigure.REFUSED_AT)


def test_while_none_is_taken_the_reason_is_that_of_what_was_examined_since() -> None:
    figures = USED_UP | {"refused_repeated": 300.0, "refused_surplus": 4_000.0, "since_taken_mostly_repeated": 40.0}
    assert "refused 4,943: repeated" in shown(model(node(refused=4_943.0, **figures)), width=80)
    taking = figures | {"last_taken_at": NOW - 1}
    assert "refused 4,943: surplus" in shown(model(node(refused=4_943.0, **taking)), width=80)


def test_status_has_a_line_about_it_with_the_reason_and_where_to_look() -> None:
    def told(**figures: float) -> str:
        console = Console(width=100, file=io.StringIO(), record=True)
        show(SwarmSnapshot(NOW, (node(**figures),), (), True), console)
        return console.export_text()

    line = "alpha: no foreign group taken for 4m: what it is sent is refused"
    where = "(`swarm rollouts alpha --refused`)"
    assert f"{line} {where}" in told(**USED_UP)
    mostly = told(**USED_UP, since_taken_mostly_repeated=40.0)
    assert f"{line}, those examined mostly for repeated {where}" in mostly
    assert "no foreign group" not in told()


def test_a_verifier_names_the_reason_of_most_that_it_examined_and_keeps_few_figures() -> None:
    board = StatusBoard("alpha", "verifier", "0")
    border = Figures(CollectorRegistry(), board, [f"task{number}" for number in range(8)]).border

    def mostly() -> dict[str, float]:
        found = board.snapshot().figures.items()
        return {reason: count for name, count in found if (reason := FigureFamily.MOSTLY_REFUSED.what(name))}

    for reason, times in ((Refusal.SURPLUS, 9), (Refusal.FLOOD, 9), (Refusal.TOO_OLD, 1), (Refusal.REPEATED, 2)):
        for _ in range(times):
            border.refused(Refused(reason, "beta", ""))
    assert mostly() == {"repeated": 2}
    border.refused(Refused(Refusal.TOO_OLD, "beta", ""))
    border.refused(Refused(Refusal.TOO_OLD, "beta", ""))
    assert mostly() == {"too_old": 3}
    border.accepted("task0", JobResult([1.0], None, None, "", 0, 0.1))
    assert mostly() == {}
    for reason in Refusal:
        border.refused(Refused(reason, "beta", ""))
    assert len(mostly()) == 1
    assert decode(encode(board.snapshot()), ServiceStatus).figures, "a status holds no more figures than may be read"

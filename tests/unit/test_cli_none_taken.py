"""A node that used to take foreign groups and refuses all of them now is said to by every
display.
"""

from __future__ import annotations

import io

from prometheus_client import CollectorRegistry
from rich.console import Console

from services.verifier.border import Refusal, Refused
from services.verifier.figures import Figures
from shared.contracts.codec import decode, encode
from shared.contracts.control import ServiceStatus
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.runtime.status import StatusBoard
from shared.tasks.sandbox import JobResult
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.observe.status import show
from tests.unit.test_cli_top import NOW, node, shown

USED_UP = {"last_taken_at": NOW - 250, "last_refused_at": NOW - 2, "since_taken_refused": 900.0, "refused_repeated": 900.0}


def test_a_node_that_takes_no_more_is_told_by_every_display() -> None:
    dry = node(refused=12_345.0, **USED_UP)
    assert dry.takes_none_s == 250 and dry.words == "working, no foreign group taken for 4m"
    line = next(line for line in shown(dry).splitlines() if "no foreign group taken for 4m" in line)
    assert line.startswith("  no foreign group"), "before what the processes do"
    assert "taken 800  refused 12,345: 900 repeated, 9 flood" in shown(dry)
    assert "no foreign group taken for 4m" in shown(dry, node("beta"), height=5)
    (seen,) = swarm_object(SwarmState(NOW, (dry,), (), True), RecentGroups())["nodes"]
    assert (seen["kind"], seen["words"]) == ("running", "working, no foreign group taken for 4m")


def test_nothing_is_told_of_a_node_that_takes_groups_is_sent_none_or_never_took_any() -> None:
    for figures in (
        {},
        USED_UP | {"last_taken_at": NOW - 100},
        USED_UP | {"last_refused_at": NOW - 100},
        USED_UP | {"since_taken_refused": 15.0},
        {name: value for name, value in USED_UP.items() if name != "last_taken_at"},
    ):
        well = node(**figures)
        assert well.takes_none_s is None and well.none_taken == "" and well.words == "working", figures
        assert "no foreign group" not in shown(well)


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
    dry = node(refused=4_943.0, **figures)
    assert dry.mostly_refused == "repeated" and dry.refusals() == "4,000 surplus (never examined), 300 repeated"
    assert "no foreign group taken for 4m (mostly repeated)" in shown(dry)
    assert "mostly repeated" not in shown(node(refused=4_943.0, **figures | {"last_taken_at": NOW - 1}))


def test_status_says_where_each_refused_group_is() -> None:
    def told(**figures: float) -> str:
        console = Console(width=100, file=io.StringIO(), record=True)
        show(SwarmState(NOW, (node(**figures),), (), True), console)
        return console.export_text()

    assert "no foreign group taken for 4m" in told(**USED_UP) and "`swarm rollouts alpha --refused`" in told(**USED_UP)
    assert "no foreign group" not in told() and "--refused" not in told()


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

"""A node that used to take foreign groups and refuses all of them now is said to: in `swarm top`,
in the progress view, and on the page.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.verifier.figures import Figures
from services.verifier.refusals import Refusal, Refused
from shared.contracts.status_figures import StatusFigure
from shared.runtime.status import StatusBoard
from shared.tasks.sandbox import JobResult
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.dashboard.swarm_state import swarm_object
from swarm_cli.observe.progress import state
from swarm_cli.observe.snapshot import SwarmSnapshot
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

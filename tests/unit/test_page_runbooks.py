"""The runbooks that the page serves for its alerts."""

from __future__ import annotations

import json
from pathlib import Path

from monitoring.dashboards import dashboards
from swarm_cli.dashboard.command import SHOWN
from swarm_cli.dashboard.runbooks import runbook
from swarm_cli.dashboard.server import PAGE
from tests.monitoring.all_rules import alerts


def test_every_alert_has_its_runbook_on_the_page() -> None:
    for alert in alerts():
        status, body = runbook(alert.name)
        told = json.loads(body)
        assert status == 200 and told["text"].startswith(f"# {alert.name}\n")


def test_what_is_no_runbook_is_not_served_and_a_package_without_them_names_the_file(tmp_path: Path) -> None:
    for name in ("../design", "", "README.md", "/etc/passwd"):
        assert runbook(name)[0] == 404, name
    status, body = runbook("NatsDown", tmp_path / "none")
    assert status == 404 and "`docs/runbooks/NatsDown.md` in the source" in json.loads(body)["problem"]


def test_a_card_leads_to_the_panels_that_are_on_this_page() -> None:
    shown = [dashboards()[name].uid for name in SHOWN]
    assert all(uid in (PAGE / "swarm.js").read_text() for uid in shown)
    assert "swarm-nats" not in (PAGE / "swarm.js").read_text() and "swarm-nats" not in shown


def test_the_runbook_of_a_node_that_stands_still_tells_each_cause_by_words_that_are_shown() -> None:
    here = json.loads(runbook("SwarmTrainerStalled")[1])["text"].split("## On one machine")[1]
    shown = "".join((PAGE.parents[1] / "observe" / f"{name}.py").read_text() for name in ("standing", "status", "top_view"))
    for words in ("not answering for ", "no word from ", "never seen", "ended "):
        assert words.strip() in here and words in shown, words
    assert "The server does not answer" in here and "The server does not answer" in (PAGE / "swarm.js").read_text()
    for remedy in ("swarm restart NODE-ROLE --now", "swarm restart nats", "SwarmNoRolloutsIngested", "var/runs/RUN/NODE/ROLE.log"):
        assert remedy in here, remedy


def test_no_runbook_says_that_a_hanging_process_is_restarted_by_a_supervisor_on_one_machine() -> None:
    stalled = " ".join(json.loads(runbook("SwarmTrainerStalled")[1])["text"].split())
    assert "or the supervisor" not in stalled
    assert "nothing restarts a process that hangs: `swarm restart NODE-trainer`" in stalled


def test_the_runbook_of_a_node_that_takes_no_group_names_a_small_file_that_is_used_up() -> None:
    told = " ".join(json.loads(runbook("SwarmNoRolloutsIngested")[1])["text"].split())
    assert "`repeated` (a small file used up)" in told and "never examined" in told

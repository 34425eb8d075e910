"""The runbooks say what commands and the page show, and what mends it on one machine."""

from __future__ import annotations

from pathlib import Path

from swarm_cli.dashboard.server import PAGE

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"


def runbook(name: str) -> str:
    return (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")


def test_the_runbook_of_a_node_that_stands_still_tells_each_cause_by_words_that_are_shown() -> None:
    here = runbook("SwarmTrainerStalled") + runbook("README")
    shown = "".join((PAGE.parents[1] / "observe" / f"{name}.py").read_text() for name in ("node_state", "status"))
    for words in ("not answering for ", "no word from ", "never seen", "ended "):
        assert words.strip() in here and words in shown, words
    assert "The server does not answer" in here and "The server does not answer" in (PAGE / "swarm.js").read_text()
    for remedy in ("swarm restart NODE-ROLE --now", "swarm restart nats", "SwarmNoRolloutsIngested", "var/runs/RUN/NODE/ROLE.log"):
        assert remedy in here, remedy


def test_no_runbook_says_that_a_hanging_process_is_restarted_by_a_supervisor_on_one_machine() -> None:
    stalled = " ".join(runbook("SwarmTrainerStalled").split())
    assert "or the supervisor" not in stalled
    assert "nothing restarts a process that hangs: `swarm restart NODE-trainer`" in stalled


def test_the_runbook_of_a_node_that_takes_no_group_names_a_small_file_that_is_used_up() -> None:
    told = " ".join(runbook("SwarmNoRolloutsIngested").split())
    assert "`repeated` (a small file used up)" in told and "never examined" in told

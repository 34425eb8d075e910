"""What the page is told of a process that does not answer, before and after it counts as gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.contracts.control import ServiceStatus, TrainerPosition
from shared.contracts.status_figures import StatusFigure
from shared.roles import ROLES
from swarm_cli.dashboard.page_state import IN_CLUSTER, swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.remedies import folder_here
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.runs import VAR_DIR_VARIABLE, RunEnd
from swarm_cli.target import Target

NOW = 1_000_000.0
AGAIN = "`swarm restart alpha-verifier` starts it again (with `--now` if it hangs)"


def told(*, verifier_s: float, step_s: float = 1.0, run: Path | None = None) -> dict[str, object]:
    """Return what the page is told when the verifier's last word is so old, and the last step."""
    statuses = tuple(
        ServiceStatus(
            node="alpha",
            role=role,
            replica="0",
            pid=1,
            host="h",
            state="training",
            started_at=NOW - 5000,
            updated_at=NOW - (verifier_s if role == "verifier" else 1.0),
            figures={StatusFigure.WORKED_AT: NOW - step_s, StatusFigure.WORK_EVERY_S: 1.0} if role == "trainer" else {},
        )
        for role in ROLES
    )
    node = NodeState("alpha", statuses, TrainerPosition(policy_version=3, consumed_local=3), at=NOW)
    return swarm_object(SwarmState(NOW, (node,), (), True), RecentGroups(), run=run)


def test_a_process_that_misses_reports_is_told_long_before_it_counts_as_gone() -> None:
    well, late, gone = (told(verifier_s=age_s) for age_s in (8.0, 14.0, 31.0))
    nodes = [each["nodes"][0] for each in (well, late, gone)]  # type: ignore[index]
    assert [each["state"] for each in (well, late, gone)] == ["running", "running", "failed"]
    assert [node["trouble"] for node in nodes] == ["", "unanswered", ""]
    assert [[each["process"] for each in node["away"]] for node in nodes] == [[], ["alpha-verifier"], ["alpha-verifier"]]
    assert nodes[1]["words"] == "verifier not answering for 14s"


def test_a_node_that_answers_and_stands_still_is_told_from_one_that_does_not_answer() -> None:
    (node,) = told(verifier_s=1.0, step_s=60.0)["nodes"]  # type: ignore[misc, attr-defined]
    assert (node["trouble"], node["away"], node["words"]) == ("still", [], "no step for 1m (usually every 1s)")


def test_the_log_of_a_process_is_named_where_the_run_is_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "var" / "runs" / "one" / "alpha" / "verifier.log"
    log.parent.mkdir(parents=True)
    log.touch()

    def named(target: Target) -> tuple[str, str, bool]:
        state = told(verifier_s=40.0, run=folder_here(Path("var"), target))
        away = state["nodes"][0]["away"][0]  # type: ignore[index]
        return away["log"], away["again"], bool(state["cluster"])

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(IN_CLUSTER, raising=False)
    monkeypatch.delenv(VAR_DIR_VARIABLE, raising=False)
    here = Target("nats://127.0.0.1:4222", None, "one")
    assert named(here) == ("var/runs/one/alpha/verifier.log", AGAIN, False)
    assert named(Target(here.node_url, None)) == ("", "", False), "no run here uses this server"
    assert named(Target(here.node_url, None, "one", RunEnd("stopped", NOW))) == ("", "", False)
    monkeypatch.setenv(IN_CLUSTER, "10.0.0.1")
    assert named(Target("nats://nats:4222", None)) == ("", "", True)

"""The metrics as they are exported: names, labels, what is zero at first and what is absent; and
the page that lists them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

from monitoring.metrics_doc import COMMAND, PAGE, ROLES, full_name, labels_of, render, role_families, role_registry
from services.generator.figures import Figures as GeneratorFigures
from services.sampler.memory import DropReason
from services.trainer.selection.group_tokens import GROUP_BUDGET, SENDER_BUDGET
from services.verifier.figures import Figures as VerifierFigures
from shared.contracts.control import EvalReport
from shared.rewards import Mark
from shared.runtime.metrics import DefaultRegistryMetrics, LateGauge, PlaneMetrics
from shared.runtime.status import StatusBoard
from shared.tasks.sandbox import JobResult
from shared.transport.base import ERROR_KINDS
from tests.nats_server import own_plane

REPO = Path(__file__).resolve().parents[2]
OTHER_UNITS = re.compile(r"_(ms|milliseconds|minutes|hours|mb|mib|gib|kilobytes|percent|pct|fraction)(_|$)")


def board(role: str) -> StatusBoard:
    return StatusBoard("alpha", role, "0")


def test_the_page_of_metrics_is_what_the_code_exports():
    assert PAGE.read_text(encoding="utf-8") == render(), f"docs/metrics.md is stale: run `{COMMAND}`"


@pytest.mark.parametrize("role", ROLES)
def test_names_units_and_help_texts_follow_the_rules(role: str):
    for family in role_families(role):
        name = full_name(family)
        assert re.fullmatch(r"swarm_[a-z0-9]+(_[a-z0-9]+)*", name)
        assert (family.type == "counter") == name.endswith("_total"), name
        assert not OTHER_UNITS.search(name), name
        assert family.documentation.endswith(".") and family.documentation[0].isupper() or family.documentation[0] == "1", name
        assert not {"node", "role", "job", "instance"} & labels_of(family).keys(), name
        if family.type == "histogram":
            assert any(sample.name.endswith("_bucket") for sample in family.samples), f"{name} is not exported from the start"


@pytest.mark.parametrize("role", ROLES)
def test_what_is_exported_at_the_start_is_zero_or_absent(role: str):
    expected = {"swarm_build_info": 1.0, "swarm_run_info": 1.0, "swarm_ready": 1.0, "swarm_sampler_wanted_groups": 0.0}
    for family in role_families(role):
        for sample in family.samples:
            assert sample.value == expected.get(sample.name, 0.0), sample


def test_no_series_says_when_another_was_made():
    for role in ROLES:
        assert b"_created" not in generate_latest(role_registry(role))


def test_every_reason_and_kind_that_the_code_can_count_is_exported_from_the_start():
    trainer = {family.name: labels_of(family) for family in role_families("trainer")}
    skipped = _first_arguments("SkippedGroup", "selection/intake.py", "selection/group_tokens.py")
    assert skipped and skipped | {"absurd", GROUP_BUDGET, SENDER_BUDGET} == set(trainer["swarm_trainer_skipped_groups"]["reason"])
    kinds = _first_arguments("trying", "service.py", "step_publisher.py")
    assert kinds and kinds == set(trainer["swarm_trainer_write_failures"]["kind"]) == set(
        trainer["swarm_trainer_write_failing"]["kind"]
    )
    sampler = {family.name: labels_of(family) for family in role_families("sampler")}
    assert set(get_args(DropReason)) == set(sampler["swarm_sampler_dropped_groups"]["reason"])


def _first_arguments(call: str, *files: str) -> set[str]:
    found = set()
    for file in files:
        for node in ast.walk(ast.parse((REPO / "services" / "trainer" / file).read_text())):
            named = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == call
            if named and node.args and isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
    return found


def test_a_late_gauge_is_absent_until_it_is_set_and_its_name_is_taken():
    registry = CollectorRegistry()
    gauge = LateGauge("swarm_thing_ratio", "Thing.", registry=registry)
    assert registry.get_sample_value("swarm_thing_ratio") is None
    with pytest.raises(ValueError, match="swarm_thing_ratio"):
        LateGauge("swarm_thing_ratio", "Thing.", registry=registry)
    gauge.set(0.0)
    assert registry.get_sample_value("swarm_thing_ratio") == 0.0
    gauge.set(None)
    assert registry.get_sample_value("swarm_thing_ratio") is None


async def test_a_plane_that_was_never_reached_is_down_and_one_that_is_shows_its_counts():
    registry = CollectorRegistry()
    planes, transport = PlaneMetrics(registry), await own_plane()
    planes.watch("node", lambda: transport)
    planes.watch("swarm", lambda: None)
    transport.counters.reconnects = 3
    transport.counters.errors["permissions"] = 2
    value = registry.get_sample_value
    assert value("swarm_nats_connected", {"plane": "node"}) == 1.0
    assert value("swarm_nats_connected", {"plane": "swarm"}) == 0.0
    assert value("swarm_nats_reconnects_total", {"plane": "node"}) == 3.0
    assert [value("swarm_nats_errors_total", {"plane": "node", "kind": kind}) for kind in ERROR_KINDS].count(2.0) == 1
    assert all(value("swarm_nats_errors_total", {"plane": "swarm", "kind": kind}) == 0.0 for kind in ERROR_KINDS)


def test_a_library_s_metrics_are_shown_without_those_of_the_process_twice():
    registry = role_registry("generator")
    DefaultRegistryMetrics("borrowed:", registry)
    borrowed = Counter("borrowed:requests", "Requests of a library that knows no other registry.")
    try:
        borrowed.inc(2)
        shown = generate_latest(registry).decode()
    finally:
        REGISTRY.unregister(borrowed)
    assert "borrowed:requests_total 2.0" in shown
    assert shown.count("\nprocess_start_time_seconds ") == shown.count("# TYPE python_info ") == 1


def test_a_held_out_result_is_absent_until_it_is_there_and_the_base_policy_s_stays():
    registry = CollectorRegistry()
    figures = GeneratorFigures(registry, board("generator"), ["leg_counting"])
    figures.base_pass_ratio(None)
    shown = ("swarm_held_out_pass_ratio", "swarm_held_out_policy_version", "swarm_held_out_base_pass_ratio")
    assert [registry.get_sample_value(name) for name in shown] == [None, None, None]
    for version, rate in ((0, 0.25), (10, 0.75)):
        figures.evaluated(
            EvalReport(
                node="alpha",
                policy_version=version,
                created_at=0.0,
                n=4,
                pass_rate=rate,
                mean_reward=rate,
                per_task={},
                seconds=0.0,
            )
        )
        if version == 0:
            figures.base_pass_ratio(rate)
    assert [registry.get_sample_value(name) for name in shown] == [0.75, 10.0, 0.25]


def test_completions_are_counted_by_what_became_of_them_and_by_whose_they_are():
    registry = CollectorRegistry()
    figures = VerifierFigures(registry, board("verifier"), ["leg_counting"])
    marks = [Mark.UNSAID, Mark.TIMEOUT, Mark.KILLED, Mark.UNSAID, Mark.RAISED]
    rewards = [1.0, None, None, 0.5, None]
    figures.scoring.scored("local", "leg_counting", JobResult(rewards, None, None, "", 2, 0.1, deaths=1, marks=marks))
    figures.border.accepted("not_ours", JobResult([1.0, 1.0], None, None, "", 0, 0.1, marks=[Mark.PASSED, Mark.UNSAID]))
    figures.scoring.unscored("external", 4, JobResult([], None, "scoring_timeout", "", 2, 0.1))

    def jobs(origin: str) -> dict[str, float | None]:
        labels = ({"origin": origin, "result": result} for result in ("scored", "raised", "timeout", "killed", "error"))
        return {each["result"]: registry.get_sample_value("swarm_verify_jobs_total", each) for each in labels}

    assert jobs("local") == {"scored": 2.0, "raised": 1.0, "timeout": 1.0, "killed": 1.0, "error": 0.0}
    assert jobs("external") == {"scored": 2.0, "raised": 0.0, "timeout": 2.0, "killed": 0.0, "error": 2.0}
    assert registry.get_sample_value("swarm_reward_sum", {"origin": "local"}) == 1.5
    assert registry.get_sample_value("swarm_reward_bucket", {"origin": "external", "le": "0.99"}) == 0.0
    assert registry.get_sample_value("swarm_verify_duration_seconds_count", {"task": "leg_counting"}) == 1.0
    assert registry.get_sample_value("swarm_verify_duration_seconds_count", {"task": "_other"}) == 1.0

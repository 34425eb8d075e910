"""The order in which the suite's files are given to its workers: the longest first, so that no long
file is started last and keeps one worker busy while the others are done.

xdist orders files by their number of tests, which puts a file with few long tests last.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

DEAREST = (
    "tests/integration/test_sharing_run.py",
    "tests/engines",
    "tests/integration/test_page_browser.py",
    "tests/monitoring/test_real_prometheus.py",
    "tests/integration/test_model_import_smollm2.py",
    "tests/integration/test_new.py",
    "tests/integration/test_runbook_commands.py",
    "tests/integration/test_verifier_trust.py",
    "tests/integration/test_trainer_distributed_service.py",
    "tests/k8s/test_render.py",
    "tests/integration/test_trainer_distributed.py",
    "tests/integration/test_up.py",
    "tests/e2e/test_swarm.py",
    "tests/integration/test_page_trouble.py",
    "tests/chaos/test_chaos_node.py",
    "tests/k8s/test_run_overlay.py",
    "tests/integration/test_task_audit.py",
    "tests/integration/test_unreadable_answers.py",
    "tests/integration/test_silent_server.py",
    "tests/integration/test_join_hub.py",
    "tests/e2e/test_extension_examples.py",
    "tests/lab/test_experiment_command.py",
    "tests/integration/test_verifier_copies.py",
    "tests/integration/test_verifier_service.py",
    "tests/integration/test_foreign_scoring.py",
    "tests/k8s/test_nats_config.py",
    "tests/integration/test_trainer_killed.py",
    "tests/integration/test_wheel.py",
    "tests/integration/test_verifier_scoring_cost.py",
    "tests/e2e/test_secured_swarm.py",
    "tests/integration/test_top.py",
    "tests/integration/test_ended_run.py",
    "tests/integration/test_transport_nats.py",
    "tests/integration/test_policy_refused.py",
    "tests/unit/test_cli_config.py",
    "tests/unit/test_file_bombs.py",
    "tests/integration/test_hostile_headers.py",
    "tests/e2e/test_join_secured.py",
    "tests/integration/test_nats_reply_attacks.py",
    "tests/integration/test_verifier_sandbox.py",
    "tests/unit/test_up_behaves.py",
    "tests/integration/test_foreign_lane_taken_over.py",
    "tests/integration/test_restart_named.py",
    "tests/integration/test_foreign_claims.py",
    "tests/integration/test_nats_limits.py",
    "tests/integration/test_nats_permissions.py",
    "tests/integration/test_member_of_hub.py",
    "tests/k8s/test_operating_steps.py",
    "tests/integration/test_service_end.py",
    "tests/integration/test_hub_away.py",
    "tests/unit/test_model_facts.py",
    "tests/lab/test_simulate.py",
    "tests/integration/test_lease_attacked.py",
    "tests/integration/test_gpu_check.py",
    "tests/unit/test_config_check_rounds.py",
    "tests/unit/test_base_policy.py",
    "tests/k8s/test_small_kubelet.py",
    "tests/k8s/test_k8s_check.py",
    "tests/unit/test_foreign_influence.py",
    "tests/integration/test_verifier_large_payloads.py",
    "tests/integration/test_bad_input.py",
    "tests/unit/test_few_rows.py",
    "tests/unit/test_cli_start.py",
    "tests/k8s/test_outside.py",
    "tests/integration/test_step_memory.py",
    "tests/unit/test_model_import.py",
    "tests/integration/test_memory_need.py",
    "tests/integration/test_dead_letters.py",
    "tests/integration/test_name_lease.py",
    "tests/k8s/test_nats_reload_container.py",
    "tests/k8s/test_k8s_secrets.py",
    "tests/integration/test_page_heat.py",
    "tests/integration/test_full_server.py",
    "tests/integration/test_task_scoring_cli.py",
    "tests/lab/test_experiment_jobs.py",
)
"""Files that take twelve seconds or more of a suite on two cores, longest first. `make test` lists
the longest tests at its end. `tests/engines` is one piece, because its files share engines that
take a quarter of a minute to start.
"""
_RENDERING = "tests/k8s/test_render.py"
TOGETHER = dict.fromkeys(
    (
        "tests/k8s/test_counted_steps.py",
        "tests/k8s/test_k8s_check_configuration.py",
        "tests/k8s/test_semantics_changes.py",
        "tests/k8s/test_semantics_config.py",
        "tests/k8s/test_semantics_network.py",
        "tests/k8s/test_semantics_pods.py",
    ),
    _RENDERING,
) | {"tests/unit/test_trainer_foreign_weights.py": "tests/unit/test_trainer_against_trl.py"}
"""Files that are one piece with another: in one process they render each variant of the manifests,
or import TRL, once, and not once in each worker.
"""
COMPUTING = ("tests/unit/", "tests/lab/", "tests/architectures/")
"""Folders whose tests compute; those of the others mostly wait for servers and services."""
_PLACES = {name: place for place, name in enumerate(DEAREST)}


def piece(nodeid: str) -> str:
    """The unit that one worker gets: the test's file, the folder that shares fixtures, or the file
    that it is together with.
    """
    file = nodeid.split("::", 1)[0]
    file = TOGETHER.get(file, file)
    folder = str(Path(file).parent)
    return folder if folder in _PLACES else file


def dearest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests in the order in which their files are started: the dearest, then those that compute
    mixed evenly with those that wait, so that the processors have something to do all the time. The
    order within a file is kept.
    """
    pieces: dict[str, list[pytest.Item]] = {}
    for item in items:
        pieces.setdefault(piece(item.nodeid), []).append(item)
    rest = [name for name in pieces if name not in _PLACES]
    computing = [name for name in rest if name.startswith(COMPUTING)]
    waiting = [name for name in rest if not name.startswith(COMPUTING)]
    places = {name: len(_PLACES) + (index + 0.5) / len(part) for part in (computing, waiting) for index, name in enumerate(part)}
    return [item for name in sorted(pieces, key=(places | _PLACES).__getitem__) for item in pieces[name]]

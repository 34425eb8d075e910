"""A run that has ended, from its records on this machine: its nodes' last step, their held-out
scores, and when each process wrote its last line. A server's store is not read.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from shared.contracts.control import ServiceStatus, TrainerPosition
from shared.contracts.wire import is_node_name
from shared.roles import ROLES
from shared.run_records import EVAL_FILE, METRICS_FILE
from shared.runtime.status import STOPPED
from swarm_cli.errors import CommandError
from swarm_cli.observe.evaluations import newest_step
from swarm_cli.observe.recorded_scores import RecordedScores
from swarm_cli.observe.snapshot import NodeSnapshot, SwarmSnapshot
from swarm_cli.observe.view import NodeView
from swarm_cli.run_end import RunEnd


def ended_run(folder: Path, end: RunEnd, nodes: list[str] | None = None) -> SwarmSnapshot:
    """The nodes of the run in `folder` as they were at its end; only `nodes` if some are named.

    Raises:
        CommandError: the run has no node of such a name.
    """
    there = sorted(each.name for each in folder.iterdir() if is_node_name(each.name) and _is_node(each)) if folder.is_dir() else []
    if unknown := [name for name in nodes or [] if name not in there]:
        has = ", ".join(there) or "no node"
        raise CommandError(f"run {folder.name} has no records of {', '.join(unknown)}: it has those of {has}")
    views = [_view(folder / name, end) for name in there if not nodes or name in nodes]
    return SwarmSnapshot(time.time(), tuple(NodeSnapshot(view, (), False) for view in views), (), None)


def _is_node(folder: Path) -> bool:
    names = (METRICS_FILE, EVAL_FILE, *(f"{role}.log" for role in ROLES))
    return any((folder / name).is_file() for name in names)


def _view(folder: Path, end: RunEnd) -> NodeView:
    node = folder.name
    reports = [each.newest for each in RecordedScores().read({node: folder}).get(node, {}).values()]
    evaluation = max(reports, key=lambda report: report.created_at, default=None)
    step = newest_step(folder).get("step", 0)
    step = step if isinstance(step, int) and step >= 0 else 0
    statuses = [
        ServiceStatus(
            node=node, role=role, replica="0", pid=0, host=socket.gethostname(), state=STOPPED, started_at=0.0,
            updated_at=min(end.at, max(0.0, log.stat().st_mtime)) if (log := folder / f"{role}.log").is_file() else end.at,
            figures={},
        )
        for role in ROLES
    ]  # fmt: skip
    position = TrainerPosition(policy_version=step, consumed_local=0, finished=end.how == "complete")
    version = max(step, evaluation.policy_version if evaluation is not None else 0)
    return NodeView(node, tuple(statuses), position, evaluation=evaluation, run=folder.parent.name, recorded_version=version)

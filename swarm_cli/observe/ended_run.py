"""A run that has ended, from its records on this machine: its nodes' last step, their held-out
scores, and when each process wrote its last line. A server's store is not read.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from shared.contracts.control import ServiceStatus, TrainerPosition
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.contracts.wire import is_node_name
from shared.rewards import CAUSES
from shared.roles import ROLES, Role
from shared.run_records import EVAL_FILE, METRICS_FILE
from shared.runtime.status import STOPPED
from shared.suggestion import did_you_mean
from swarm_cli.errors import CommandError
from swarm_cli.observe.evaluations import newest_step, read_unknown
from swarm_cli.observe.recorded_scores import RecordedScores
from swarm_cli.observe.snapshot import NodeSnapshot, SwarmSnapshot
from swarm_cli.observe.view import NodeView
from swarm_cli.run_end import RunEnd

_NODES_NAMED = 20


def ended_run(folder: Path, end: RunEnd, nodes: list[str] | None = None) -> SwarmSnapshot:
    """The nodes of the run in `folder` as they were at its end; only `nodes` if some are named.

    Raises:
        CommandError: the run has no node of such a name.
    """
    there = nodes_on_record(folder)
    if unknown := [name for name in nodes or [] if name not in there]:
        raise no_records(folder, unknown)
    views = [_view(folder / name, end) for name in there if not nodes or name in nodes]
    return SwarmSnapshot(time.time(), tuple(NodeSnapshot(view, (), False) for view in views), (), None)


def nodes_on_record(folder: Path) -> list[str]:
    """The nodes of which the run in `folder` has records, by name."""
    if not folder.is_dir():
        return []
    return sorted(each.name for each in folder.iterdir() if is_node_name(each.name) and _is_node(each))


def no_records(folder: Path, unknown: Sequence[str]) -> CommandError:
    """The error that the run in `folder` has no records of some nodes, with those that it has."""
    there = nodes_on_record(folder)
    has = ", ".join(there[:_NODES_NAMED]) or "no node"
    more = f" and {len(there) - _NODES_NAMED} more" if len(there) > _NODES_NAMED else ""
    guess = f"; {question}" if (question := did_you_mean(unknown[0], there)) else ""
    return CommandError(f"run {folder.name} has no records of {', '.join(unknown)}: it has those of {has}{more}{guess}")


def _is_node(folder: Path) -> bool:
    names = (METRICS_FILE, EVAL_FILE, *(f"{role}.log" for role in ROLES))
    return any((folder / name).is_file() for name in names)


def _view(folder: Path, end: RunEnd) -> NodeView:
    node = folder.name
    reports = [each.newest for each in RecordedScores().read({node: folder}).get(node, {}).values()]
    evaluation = max(reports, key=lambda report: report.created_at, default=None)
    step = newest_step(folder).get("step", 0)
    step = step if isinstance(step, int) and step >= 0 else 0
    figures: dict[Role, dict[str, float]] = {"verifier": _unknown_rewards(folder)}
    if evaluation is not None and evaluation.unknown:
        figures["generator"] = {StatusFigure.EVAL_UNKNOWN: float(evaluation.unknown)}
    statuses = [
        ServiceStatus(
            node=node, role=role, replica="0", pid=0, host=socket.gethostname(), state=STOPPED, started_at=0.0,
            updated_at=min(end.at, max(0.0, log.stat().st_mtime)) if (log := folder / f"{role}.log").is_file() else end.at,
            figures=figures.get(role, {}),
        )
        for role in ROLES
    ]  # fmt: skip
    position = TrainerPosition(policy_version=step, consumed_local=0, finished=end.how == "complete")
    version = max(step, evaluation.policy_version if evaluation is not None else 0)
    return NodeView(node, tuple(statuses), position, evaluation=evaluation, run=folder.parent.name, recorded_version=version)


def _unknown_rewards(folder: Path) -> dict[str, float]:
    """The verifier's counts of answers whose reward is unknown, as its status had them."""
    figures: dict[str, float] = {}
    for (_, cause), answers in read_unknown(folder).items():
        if cause in CAUSES:
            name = FigureFamily.UNKNOWN_REWARDS.of(cause)
            figures[name] = figures.get(name, 0.0) + answers
    return figures

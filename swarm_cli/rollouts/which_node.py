"""Says which node's rollouts are shown if the user named none."""

from __future__ import annotations

from pathlib import Path

from shared.config import NodeConfig
from shared.contracts.wire import is_node_name
from shared.roles import ROLES
from swarm_cli.rollouts.records import record_folder

_NODES_NAMED = 8


def node_shown(config: NodeConfig, run: str) -> str:
    """A sentence with the node that is shown and the others of its run on this machine."""
    node = config.node.id
    others = [name for name in _nodes(config, run) if name != node]
    if not others:
        return f"this is node {node}: `swarm rollouts NODE` shows another"
    more = f" and {len(others) - _NODES_NAMED} more" if len(others) > _NODES_NAMED else ""
    return f"this is node {node}; `swarm rollouts NODE` shows another: {', '.join(others[:_NODES_NAMED])}{more}"


def _nodes(config: NodeConfig, run: str) -> list[str]:
    """The nodes with a folder in the run, by default in the newest with records of this one."""
    runs = config.node.var_dir / "runs"
    newest = record_folder(config, "")
    folder = Path(runs / run) if run else newest.parent if newest is not None else None
    if folder is None or not folder.is_dir():
        return []
    written = {path.parent.name for role in ROLES for path in folder.glob(f"*/{role}.log")}
    return sorted(name for name in written if is_node_name(name))

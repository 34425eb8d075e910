"""Where to read the last words of the processes that do not answer, for the page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shared.contracts.wire import is_node_name
from swarm_cli.looking.target import Target, run_here
from swarm_cli.shipped import shown

IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets this variable in every container."""


def name_logs(state: dict[str, Any], var_dir: Path, target: Target) -> None:
    """Set the `log` of each process in `away` of the state's nodes: its file, if it belongs to the
    run of this machine that is looked at. And set whether this process is in a cluster.
    """
    run = run_here(var_dir, target)
    for node in state["nodes"]:
        for each in node["away"] if run and is_node_name(node["node"]) else ():
            file = var_dir / "runs" / run / node["node"] / f"{each['process'].rpartition('-')[2]}.log"
            each["log"] = str(shown(file)) if file.is_file() else ""
    state["cluster"] = IN_CLUSTER in os.environ

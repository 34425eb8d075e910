"""Where to read the last words of the processes that do not answer, and what starts them again, for
the page.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shared.contracts.wire import is_node_name
from swarm_cli.looking.target import Target
from swarm_cli.observe.start_again import folder_here
from swarm_cli.restart_command import restart_options, starts_again
from swarm_cli.shipped import shown

IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets this variable in every container."""


def name_logs(state: dict[str, Any], var_dir: Path, target: Target) -> None:
    """Set the `log` of each process in `away` of the state's nodes, its file, and `again`, what
    starts it again, if it belongs to the run of this machine that is looked at. And set whether
    this process is in a cluster.
    """
    run = folder_here(var_dir, target)
    away = [(node["node"], each) for node in state["nodes"] for each in node["away"] if is_node_name(node["node"])]
    if run is not None and away:
        options = restart_options(run)
        for node, each in away:
            file = run / node / f"{each['process'].rpartition('-')[2]}.log"
            each["log"] = str(shown(file)) if file.is_file() else ""
            each["again"] = starts_again(each["process"], options)
    state["cluster"] = IN_CLUSTER in os.environ

"""Where to read the last words of the processes that do not answer, and what starts them again, for
the page.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.contracts.wire import is_node_name
from shared.roles import ROLES
from shared.text import visible
from swarm_cli.looking.target import Target
from swarm_cli.observe.dying import dying
from swarm_cli.observe.start_again import folder_here
from swarm_cli.observe.view import NodeView
from swarm_cli.restart_command import restart_options, starts_again
from swarm_cli.shipped import shown

DYING_SHOWN = ("running", "starting", "silent")
"""The kinds of node whose processes that die are told of."""
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets this variable in every container."""


def name_logs(state: dict[str, Any], views: Sequence[NodeView], var_dir: Path, target: Target) -> None:
    """Set the `log` of each process in `away` of the state's nodes, its file, and `again`, what
    starts it again, if it belongs to the run of this machine that is looked at, whose `views` these
    are. Add to each node's words what is known of its processes that die again and again. And set
    whether this process is in a cluster.
    """
    run = folder_here(var_dir, target)
    found = dying(views, state["at"], run)
    for node in state["nodes"]:
        own = {role: found[f"{node['node']}-{role}"] for role in ROLES if f"{node['node']}-{role}" in found}
        if (lost := [role for role, each in own.items() if each.given_up]) and node["kind"] in DYING_SHOWN:
            node["kind"] = "silent"
            known = [each["process"] for each in node["away"]]
            names = [f"{node['node']}-{role}" for role in lost]
            node["away"] += [{"process": name, "log": "", "again": ""} for name in names if name not in known]
            node["words"], state["state"] = "", "failed"
        if own and node["kind"] in DYING_SHOWN:
            node["trouble"] = node["trouble"] or ("dying" if node["kind"] == "running" else "")
            told = [f"{role} {each.words}" for role, each in own.items()]
            node["words"] = visible(", ".join(filter(None, [node["words"], *told])), 300)
    away = [(node["node"], each) for node in state["nodes"] for each in node["away"] if is_node_name(node["node"])]
    if run is not None and away:
        options = restart_options(run)
        for node, each in away:
            file = run / node / f"{each['process'].rpartition('-')[2]}.log"
            each["log"] = str(shown(file)) if file.is_file() else ""
            died = found.get(each["process"])
            if died is None or died.given_up:
                each["again"] = starts_again(each["process"], options)
            else:
                each["again"] = f"{each['process']}: {died.words}"
    state["cluster"] = IN_CLUSTER in os.environ

"""What the page reads of a run's folder on this machine: whose groups were trained on, and the
nodes' held-out scores.
"""

from __future__ import annotations

import socket
from pathlib import Path

from shared.config import NodeConfig
from swarm_cli.dashboard.recent_groups import StepPoint
from swarm_cli.dashboard.recorded_scores import ByNode, RecordedScores
from swarm_cli.dashboard.trained_groups import TrainedFollower, TrainedGroups
from swarm_cli.file_names import file_names
from swarm_cli.looking.target import Target
from swarm_cli.observe.snapshot import SwarmSnapshot
from swarm_cli.running import run_at


class RunRecords:
    """The records of one run. `scores`, `names` of files: as of the last read."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._trained = TrainedFollower()
        self._scores = RecordedScores()
        self._run = ""
        self.scores: ByNode = {}
        self.names = file_names(None, config.tasks)

    @property
    def trained(self) -> TrainedGroups:
        """Whose groups were trained on, as of the last read."""
        return self._trained.found

    @property
    def taken(self) -> dict[str, int]:
        """The last step that each node's trainer has recorded, as of the last read."""
        return self._trained.newest

    def rewards(self, node: str) -> list[StepPoint]:
        """The rewards of the steps that the node's trainer has recorded."""
        return self._trained.rewards(node)

    def read(self, snapshot: SwarmSnapshot, target: Target) -> None:
        """Read what is new. It may take a second where a run is long."""
        folders = self._folders(snapshot, target)
        stepping = [node.node for node in snapshot.nodes if node.view.step > 0]
        self._trained.read_on({node: folders[node] for node in stepping if node in folders})
        run_folder = next((folder.parent for folder in folders.values() if folder is not None), None)
        self.names = file_names(run_folder, self._config.tasks)
        self.scores = self._scores.read({node: folder for node, folder in folders.items() if folder is not None})

    def _folders(self, snapshot: SwarmSnapshot, target: Target) -> dict[str, Path | None]:
        """The folders in the run of the nodes on this server; None if it is not on this machine."""
        var_dir, here = self._config.node.var_dir, socket.gethostname()
        self._run = target.run or run_at(var_dir, target.node_url) or self._run  # kept when it has ended
        run = self._run
        folders: dict[str, Path | None] = {}
        for node in snapshot.nodes:
            if node.statuses:
                # Of an unknown run, only processes on this machine write into this folder.
                near = run or any(status.host == here for role in ("trainer", "generator") for status in node.view.roles(role)[:1])
                folders[node.node] = var_dir / "runs" / (run or self._config.node.run) / node.node if near else None
        return folders

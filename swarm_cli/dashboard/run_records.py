"""What the page reads of a run's folder on this machine: whose groups were trained on, and the
nodes' held-out scores.
"""

from __future__ import annotations

import socket
from pathlib import Path

from shared.config import NodeConfig
from swarm_cli.dashboard.recent_groups import StepPoint
from swarm_cli.dashboard.trained_groups import TrainedFollower, TrainedGroups
from swarm_cli.file_names import file_names
from swarm_cli.observe.recorded_scores import ByNode, RecordedScores
from swarm_cli.observe.snapshot import SwarmSnapshot
from swarm_cli.observe.view import NodeView


class RunRecords:
    """The records of the nodes that are looked at, each in the run that it belongs to. `scores`,
    `names` of files, `folders` on this machine: as of the last read.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._trained = TrainedFollower()
        self._scores = RecordedScores()
        self.folders: dict[str, Path] = {}
        self.scores: ByNode = {}
        self.names = file_names(None, config.tasks)

    @property
    def trained(self) -> TrainedGroups:
        """Whose groups were trained on, as of the last read."""
        return self._trained.found

    def rewards(self, node: str) -> list[StepPoint]:
        """The rewards of the steps that the node's trainer has recorded."""
        return self._trained.rewards(node)

    def read(self, snapshot: SwarmSnapshot, run: str) -> None:
        """Read what is new. It may take a second where a run is long. run: the run that is looked
        at, "" if it is not known.
        """
        folders = {node.node: self._folder(node.view, run) for node in snapshot.nodes if node.statuses}
        stepping = [node.node for node in snapshot.nodes if node.view.step > 0]
        self._trained.read_on({node: folders[node] for node in stepping if node in folders})
        self.folders = {node: folder for node, folder in folders.items() if folder is not None}
        run_folder = next((folder.parent for folder in self.folders.values()), None)
        self.names = file_names(run_folder, self._config.tasks)
        self.scores = self._scores.read(self.folders)

    def _folder(self, view: NodeView, run: str) -> Path | None:
        """The node's folder in the run that it belongs to; None if that is not on this machine."""
        runs = self._config.node.var_dir / "runs"
        if known := view.run or run:
            return runs / known / view.node
        # Of an unknown run, only processes on this machine write into this folder.
        here = socket.gethostname()
        near = any(status.host == here for role in ("trainer", "generator") for status in view.roles(role)[:1])
        return runs / self._config.node.run / view.node if near else None

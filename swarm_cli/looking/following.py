"""The run that a live view looks at: the one it found, until that one ends and another one runs."""

from __future__ import annotations

import shlex

from shared.config import NodeConfig
from swarm_cli.errors import CommandError
from swarm_cli.looking.target import Target, default_target
from swarm_cli.run_end import RunEnd, newest_ended, read_end
from swarm_cli.running import read_note, running_runs


class Following:
    """Chooses the run to look at, before each look. `target`: the current choice."""

    def __init__(self, config: NodeConfig, target: Target, *, fixed: bool) -> None:
        """fixed: the user named a server or a run, so other runs are mentioned but not
        switched to.
        """
        self._config = config
        self._fixed = fixed or "node_url" in config.nats.model_fields_set
        self.target = target

    def moved(self) -> bool:
        """Switch `target` to the only run running here; returns whether it changed. If several are
        running, `target` stays.
        """
        if self._fixed:
            return False
        try:
            found = default_target(self._config, "")
        except CommandError:
            return False
        if not found.run or found == self.target:
            return False
        self.target = found
        return True

    @property
    def follows(self) -> bool:
        """Whether it switches to the next run."""
        return not self._fixed

    @property
    def end(self) -> tuple[str, RunEnd] | None:
        """The current run and how it ended; None if it is running."""
        if self.target.ended is not None:
            return self.target.run, self.target.ended
        var_dir = self._config.node.var_dir
        if self.target.run:
            end = read_end(var_dir / "runs" / self.target.run)
            return (self.target.run, end) if end else None
        found = newest_ended(var_dir, self.target.node_url)
        return (found[0].name, found[1]) if found else None

    @property
    def before(self) -> tuple[str, RunEnd] | None:
        """Before any server has answered: the current run's end or, if no run is running here, that
        of the newest one, whatever its server was.
        """
        if self.end is not None or self._fixed or running_runs(self._config.node.var_dir):
            return self.end
        found = newest_ended(self._config.node.var_dir)
        return (found[0].name, found[1]) if found else None

    @property
    def instead(self) -> str:
        """A sentence about the runs that are running here, if `target` is not among them; else
        empty.
        """
        noted = [(folder.name, note) for folder in running_runs(self._config.node.var_dir) if (note := read_note(folder))]
        others = [(run, note.node_url) for run, note in noted if note.node_url != self.target.node_url]
        if not others or len(others) < len(noted):
            return ""
        return "; ".join(f"run {run} is running at {url} (--node-url {shlex.quote(url)})" for run, url in others[:3])

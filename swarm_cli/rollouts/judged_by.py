"""The configuration that says which verifier scored a run's answers: the run's own, if it is known
and no other one was given.
"""

from __future__ import annotations

import os
from pathlib import Path

from shared.config import ConfigError, NodeConfig, load_config
from shared.config.environment import CONFIG_FILE_VARIABLE
from shared.text import visible
from swarm_cli.chosen_config import for_node
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.own_run import is_own
from swarm_cli.rollouts.rewards import Judge
from swarm_cli.running import read_note
from swarm_cli.shipped import DEMO_CONFIG, shown
from swarm_cli.up_options import continues, options_in


def judge_of(config: NodeConfig, given: Path | None, run: str, names: FileNames = UNNAMED) -> Judge:
    """The judge of the answers in `run` ("": not known). config, given: what the command reads, and
    the file of --config. names: of the files that are datasets.

    A run that was copied here is not asked: its note may be somebody else's, and would say which
    files are read. Which configuration tells is then part of what is said.
    """
    file = given or os.environ.get(CONFIG_FILE_VARIABLE)
    started_with = _configuration_of(config.node.var_dir / "runs" / run) if run else None
    if started_with is not None and (not file or Path(file).resolve() == started_with.resolve()):
        try:
            return Judge(for_node(load_config(started_with), config.node.id), names=names)
        except (ConfigError, OSError):
            pass  # the file was changed or removed since
    return Judge(config, f"by {visible(str(file or shown(DEMO_CONFIG)), 200)}; --config names another", names)


def _configuration_of(folder: Path) -> Path | None:
    """The configuration that `swarm up` started the run with; None if it is not known."""
    note = read_note(folder)
    if note is None or not continues(note.goes_on, folder) or not is_own(folder):
        return None
    return options_in(note.goes_on).config or DEMO_CONFIG

"""The one typed configuration of a node (`NodeConfig`), and how it is loaded (`load_config`).

Importable without torch. The fields of the sections state each value's meaning, unit and reason for
the default. A process that uses a part of it imports that part from its module. The names below are
imported on first use: a process that is given a section loads nothing that reads files and
variables.
"""

from typing import TYPE_CHECKING

from shared.importing import on_first_use

if TYPE_CHECKING:
    from shared.config.load import ConfigError
    from shared.config.node import NodeConfig, load_config
    from shared.config.task_sections import TaskSpec, rewards_id, scorers_id

__all__ = ["ConfigError", "NodeConfig", "TaskSpec", "load_config", "rewards_id", "scorers_id"]

_HOMES = {
    "ConfigError": "load",
    **dict.fromkeys(("NodeConfig", "load_config"), "node"),
    **dict.fromkeys(("TaskSpec", "rewards_id", "scorers_id"), "task_sections"),
}


__getattr__ = on_first_use(__name__, _HOMES)

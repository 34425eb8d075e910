"""The one typed configuration that every service of a node reads (`NodeConfig`), and how it is
loaded (`load_config`).

Importable without torch. The fields in `sections` state each value's meaning, unit and reason for
the default.
"""

from shared.config.load import ConfigError, NodeConfig, load_config
from shared.config.sections import TaskSpec

__all__ = ["ConfigError", "NodeConfig", "TaskSpec", "load_config"]

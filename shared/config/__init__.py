"""The one typed configuration that every service of a node reads (`NodeConfig`), and how it is
loaded (`load_config`).

Importable without torch. What a value means, its unit and why it has its default stand beside the
field in `sections`.
"""

from shared.config.load import ConfigError, NodeConfig, load_config
from shared.config.sections import TaskSpec

__all__ = ["ConfigError", "NodeConfig", "TaskSpec", "load_config"]

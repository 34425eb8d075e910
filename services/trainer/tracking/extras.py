"""Determines which trackers a node uses, and whether their packages are installed. Imports none of
them.
"""

from __future__ import annotations

from importlib.util import find_spec

from shared.config import NodeConfig
from shared.registry import TRACKERS

_PACKAGE_OF = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""The package that a built-in tracker imports; the extra has the tracker's name."""


def chosen_trackers(config: NodeConfig) -> tuple[str, ...]:
    """The names in `tracking.trackers`; `auto` is TensorBoard if it is installed."""
    wanted = config.tracking.trackers
    if wanted == "auto":
        return ("tensorboard",) if is_installed("tensorboard") else ()
    return tuple(dict.fromkeys(wanted))


def tracking_problems(config: NodeConfig) -> list[str]:
    """A sentence with the remedy for each tracker that cannot be used here."""
    problems = [
        f"tracking.trackers: {name} needs the package {_PACKAGE_OF[name]}, which is not installed: pip install 'swarm-rl[{name}]'"
        for name in chosen_trackers(config)
        if name in _PACKAGE_OF and not is_installed(_PACKAGE_OF[name])
    ]
    if config.tracking.options and not set(chosen_trackers(config)) - set(TRACKERS.built_in):
        problems.append("tracking.options are for trackers from installed packages, and tracking.trackers names none")
    return problems


def is_installed(package: str) -> bool:
    """Whether `package` can be imported. A folder of that name does not count: wandb writes one
    called `wandb` wherever it is used, and Python takes any folder for a package.
    """
    found = find_spec(package)
    return found is not None and found.origin is not None

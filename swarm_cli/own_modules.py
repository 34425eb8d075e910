"""Where processes that `swarm` starts find their modules."""

from __future__ import annotations

from pathlib import Path

import swarm_cli


def own_modules() -> dict[str, str]:
    """Variables for a `python -m` that imports what is installed and nothing from the current
    folder, which Python searches first: there may lie what somebody else made, such as a run or a
    dataset. Empty where the current folder is a checkout that `swarm` itself was imported from.
    """
    return {} if Path(swarm_cli.__file__).resolve().parents[1] == Path.cwd() else {"PYTHONSAFEPATH": "1"}

"""Where processes that `swarm` starts find their modules."""

from __future__ import annotations

from pathlib import Path

import swarm_cli


def own_modules() -> dict[str, str]:
    """Environment variables that keep `python -m` from importing modules of the current folder,
    which Python searches first: it may hold files of somebody else, such as a run or a dataset.
    Empty if the current folder is the checkout that `swarm` itself was imported from.
    """
    return {} if Path(swarm_cli.__file__).resolve().parents[1] == Path.cwd() else {"PYTHONSAFEPATH": "1"}

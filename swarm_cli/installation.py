"""The installed package: its files, and how the processes that `swarm` starts find its modules."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "local" / "defaults"
DEMO_CONFIG = _FOLDER / "demo.toml"
"""The configuration of every command when neither `--config` nor `SWARM_CONFIG` names one, and the
current folder has no `PROJECT_FILE`.
"""
PROJECT_FILE = "node.toml"
"""What `swarm new` writes."""
NATS_CONFIG = _FOLDER / "nats.conf"


def shown(file: Path) -> Path:
    """`file` relative to the current folder if it is below it: short, and the same in every source
    tree.
    """
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def own_modules() -> dict[str, str]:
    """Environment variables that keep `python -m` from importing modules of the current folder,
    which Python searches first: it may hold files of somebody else, such as a run or a dataset.
    Empty if the current folder is the checkout that `swarm` itself was imported from.
    """
    return {} if Path(__file__).resolve().parents[1] == Path.cwd() else {"PYTHONSAFEPATH": "1"}

"""Files included in the package: the configurations of the demo and of the NATS server that
`swarm up` starts.

They are package data, so they are found from any folder, in a wheel as in a source tree.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "local" / "defaults"
DEMO_CONFIG = _FOLDER / "demo.toml"
"""The configuration of every command when neither `--config` nor `SWARM_CONFIG` names one."""
NATS_CONFIG = _FOLDER / "nats.conf"


def shown(file: Path) -> Path:
    """`file` relative to the current folder if it is below it: short, and the same in every source
    tree.
    """
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file

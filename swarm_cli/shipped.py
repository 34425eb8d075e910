"""The files that come with the package: the demo's configuration and that of the NATS server that
`swarm up` starts.

They are package data, so they are found from any folder and from a wheel as from a source tree.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "local" / "defaults"
DEMO_CONFIG = _FOLDER / "demo.toml"
"""What every command uses when neither `--config` nor `SWARM_CONFIG` names another configuration.
"""
NATS_CONFIG = _FOLDER / "nats.conf"


def shown(file: Path) -> Path:
    """`file` relative to the current folder where it lies below it: short to read, and the same in
    everybody's source tree.
    """
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file

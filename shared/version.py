"""The software's version, as shown to other nodes and in metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("swarm-rl")
except PackageNotFoundError:  # running from a source tree that was not installed
    VERSION = "0+source"

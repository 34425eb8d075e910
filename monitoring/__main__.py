"""`python -m monitoring render` writes the files below k8s/components/monitoring; `--check` only
lists the stale ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from monitoring.render import REPOSITORY, stale, write
from monitoring.rules.base import RUNBOOKS


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m monitoring", description="Dashboards and rules as files.")
    parser.add_argument("command", choices=["render"])
    parser.add_argument("--check", action="store_true", help="write nothing; list stale files and exit with 1 if there are any")
    parser.add_argument("--runbooks", default=RUNBOOKS, help="URL of the folder of runbook pages [default: %(default)s]")
    parser.add_argument("--into", type=Path, default=REPOSITORY, help="root folder to write below [default: this repository]")
    chosen = parser.parse_args()
    paths = stale(chosen.into) if chosen.check else write(chosen.into, chosen.runbooks)
    for path in paths:
        print(f"{'stale' if chosen.check else 'wrote'} {path}")
    return 1 if chosen.check and paths else 0


sys.exit(main())

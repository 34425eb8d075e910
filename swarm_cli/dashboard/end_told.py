"""What the page says about a run's end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from shared.text import visible
from swarm_cli.looking.following import Following
from swarm_cli.running import goes_on


def end_object(following: Following, var_dir: Path, *, seen: bool, copied: bool) -> dict[str, Any] | None:
    """What the page shows about the run's end; None if it has not ended, as far as is known. seen:
    whether a server has answered. copied: whether the page shows a copy of the run's store.
    """
    if (found := following.end if seen else following.before) is None:
        return None
    run, end = found
    command, comma, how = goes_on(var_dir / "runs" / run).partition(", with ")
    return {
        "seen": seen,
        "goes_on": visible(command if "`" in command else f"`{command}`{comma}{how}", 400),
        "run": visible(run, 80),
        "in_order": end.in_order,
        "at": end.at,
        "words": visible(end.sentence(run, time.time()), 400),
        "copied": copied,
        "follows": following.follows,
    }


def gone(following: Following) -> str:
    """Why a run's server does not answer and where its groups are, if the run has ended."""
    if (found := following.end) is None:
        return ""
    run, end = found
    return f"{end.sentence(run)}. `swarm dashboard --run {run}` shows its steps and groups"

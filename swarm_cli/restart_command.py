"""The command that starts a service of a running run again, as it is to be typed in the current
folder: the one place that knows which options `swarm restart` needs, and how it is put.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from shared.text import visible
from swarm_cli.elsewhere import DEFAULT_VAR_DIR, VAR_DIR_VARIABLE, runs_of_this_user
from swarm_cli.running import running_runs


def starts_again(service: str, options: str) -> str:
    """That, and by which command, a service is started again. options: as `restart_options`
    returns.
    """
    return f"`swarm restart {service}{options}` starts it again (with `--now` if it hangs)"


def restart_options(folder: Path) -> str:
    """The options, with a leading space, with which `swarm restart` finds the run in `folder`:
    none for the only one here, `--run` for one of several and for one in another folder, and
    `--var-dir` if that is not found by its name.
    """
    var_dir, set_here = folder.parent.parent.resolve(), os.environ.get(VAR_DIR_VARIABLE)
    name = f" --run {shlex.quote(visible(folder.name, 80))}"
    beside = any(each.name != folder.name for each in running_runs(var_dir))
    if var_dir == Path(set_here or DEFAULT_VAR_DIR).resolve():
        return name if beside else ""
    if not set_here and sum(each.name == folder.name for each in runs_of_this_user()) == 1:
        return name
    return f"{name if beside else ''} --var-dir {shlex.quote(visible(str(var_dir), 400))}"

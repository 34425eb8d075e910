"""`swarm plot`: a run's learning curves as one PNG."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from shared.config import NodeConfig
from shared.run_records import EVAL_FILE, METRICS_FILE
from shared.text import visible
from swarm_cli.console import count, note
from swarm_cli.elsewhere import DEFAULT_VAR_DIR, VAR_DIR_VARIABLE, no_run_here
from swarm_cli.errors import CommandError
from swarm_cli.observe.verdict import run_verdicts


def plot(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or the path of its folder.")],
    out: Annotated[Path | None, typer.Option(help="PNG to write.  [default: curves.png in the run's folder]")] = None,
    var_dir: Annotated[Path, typer.Option(help="Folder that holds runs/.", envvar=VAR_DIR_VARIABLE)] = DEFAULT_VAR_DIR,
) -> None:
    """Draw a run's learning curves: held-out pass rate, rewards, loss, gradient norm, entropy,
    staleness.
    """
    run_dir = find_run(run, var_dir)
    target = out or run_dir / "curves.png"
    from swarm_cli.observe.curves import draw_curves

    nodes = sorted(folder for folder in run_dir.iterdir() if _has_curves(folder))
    if not nodes:
        raise CommandError(f"{run_dir}: no node has written {METRICS_FILE} or {EVAL_FILE} yet: let the run take a step first")
    target.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(run_dir.resolve().name, nodes, target, through=out is not None)
    for line in run_verdicts(run_dir, [node.name for node in nodes]):
        note(line)
    note(f"{count(len(nodes), 'node')} ({visible(', '.join(node.name for node in nodes))})")
    typer.echo(str(target))


def find_run(run: str, var_dir: Path) -> Path:
    """Folder of a run, given by name or by path.

    Raises:
        CommandError: there is no such run; the message names the newest runs.
    """
    for folder in (var_dir / "runs" / run, Path(run)):
        if folder.is_dir():
            return folder
    runs = var_dir / "runs"
    known = sorted((f for f in runs.iterdir() if f.is_dir()), key=lambda f: -f.stat().st_mtime) if runs.is_dir() else []
    names = ", ".join(folder.name for folder in known[:5])
    hint = f"the newest there are {names}" if known else "there are none; `swarm up` makes one"
    raise CommandError(no_run_here(run, var_dir, hint))


def where_runs_are(config: NodeConfig) -> str:
    """The option, with a leading space, that commands need to find a run by its name; empty if they
    look in the right folder anyway.
    """
    found_unasked = VAR_DIR_VARIABLE in os.environ or config.node.var_dir == DEFAULT_VAR_DIR
    return "" if found_unasked else f" --var-dir {shlex.quote(str(config.node.var_dir))}"


def _has_curves(folder: Path) -> bool:
    return folder.is_dir() and any((folder / name).is_file() for name in (EVAL_FILE, METRICS_FILE))

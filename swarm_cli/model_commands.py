"""`swarm model init` and `swarm model export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_cli.base_model import TOY_POLICY, build_toy_policy
from swarm_cli.config_commands import ConfigOption, load_chosen
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.plot import find_run

model_app = typer.Typer(name="model", help="Build the toy policy, or take a trained one out.", no_args_is_help=True)


@model_app.command("init")
def init(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = TOY_POLICY,
    seed: Annotated[int | None, typer.Option(min=0, help="Of weights, order and noise.  [default: the recipe's]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Supervised steps.  [default: the recipe's]")] = None,
    config: ConfigOption = None,
) -> None:
    """Build the toy base policy for the configuration's tasks, unless it is there already."""
    folder = build_toy_policy(out, load_chosen(config).tasks, seed=seed, steps=steps)
    note("built (or found as asked for); point model.path at it")
    typer.echo(str(folder))


@model_app.command()
def export(
    run: Annotated[str, typer.Argument(help="Name of a run, or the path of its folder.")],
    node: Annotated[str, typer.Argument(help="The node whose policy is wanted.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    best: Annotated[bool, typer.Option("--best", help="The best evaluated checkpoint instead of the newest.")] = False,
    var_dir: Annotated[Path, typer.Option(help="Where runs are.", envvar="SWARM_NODE__VAR_DIR")] = Path("var"),
) -> None:
    """Write a trained policy as a Hugging Face folder that `transformers` loads."""
    typer.echo(str(export_node(node_folder(find_run(run, var_dir), node), out, best=best)))


def node_folder(run_dir: Path, node: str) -> Path:
    """Folder of a node in a run.

    Raises:
        CommandError: the run has no such node; the message names those it has.
    """
    folder = run_dir / node
    if not folder.is_dir():
        known = sorted(entry.name for entry in run_dir.iterdir() if (entry / "checkpoints").is_dir())
        raise CommandError(f"run {run_dir.name} has no node {node!r}: it has {', '.join(known) or 'none with a checkpoint yet'}")
    return folder


def export_node(folder: Path, out: Path, *, best: bool = False) -> Path:
    """Export the newest (or best) checkpoint in a node's folder, or the checkpoint that `folder` is.

    Raises:
        CommandError: no usable checkpoint, the base model is gone, or `out` holds files.
    """
    from services.trainer.checkpoint import CheckpointError
    from services.trainer.export import export_policy
    from shared.model.loading import ModelLoadError

    try:
        return export_policy(folder, out, best=best)
    except (CheckpointError, ModelLoadError, OSError) as error:
        raise CommandError(f"nothing was exported: {error}") from None

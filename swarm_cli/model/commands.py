"""`swarm model init`, `import`, `memory` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.atomic_folder import unwinding_on_signals
from shared.config import NodeConfig
from shared.config.section import Dtype
from shared.config.trainer_section import MOST_RANK
from swarm_cli.chosen_config import ConfigOption, load_chosen
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.local.base_model import TOY_POLICY, build_toy_policy
from swarm_cli.runs import DEFAULT_VAR_DIR, VAR_DIR_VARIABLE, started_with
from swarm_cli.target import find_run

if TYPE_CHECKING:
    from services.trainer.export import Exported

model_app = typer.Typer(name="model", help="Build the toy policy, import a model, or export a trained one.", no_args_is_help=True)


@model_app.command("init")
def init(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = TOY_POLICY,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights, order and noise.  [default: the recipe's]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Supervised steps.  [default: the recipe's]")] = None,
    config: ConfigOption = None,
) -> None:
    """Build the toy base policy for the configuration's tasks, unless it exists already."""
    with unwinding_on_signals():
        folder = build_toy_policy(out, load_chosen(config, NodeConfig).tasks, seed=seed, steps=steps)
    note("built, or already there; set model.path to it")
    typer.echo(str(folder))


@model_app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A GGUF file, an installed Python package that contains one, a Hugging Face folder, or a hub name (OWNER/NAME).",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist or be empty.")],
    revision: Annotated[str, typer.Option(help="Commit of a hub name, all 40 digits.")] = "",
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype of the weights.  [default: the source's; bfloat16 if it is quantised]", show_default=False),
    ] = None,
) -> None:
    """Write a folder that the trainer and every engine can load, print the memory that the model
    needs, and test it (docs/models.md).
    """
    from swarm_cli.model.importing import import_model

    with unwinding_on_signals():
        folder = import_model(source, out, revision=revision, dtype=dtype)
    typer.echo(str(folder))


@model_app.command()
def memory(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder with a config.json, or a hub name (OWNER/NAME).")],
    revision: Annotated[str, typer.Option(help="Commit of a hub name, all 40 digits.")] = "",
    dtype: Annotated[Dtype, typer.Option(help="model.dtype: dtype of matrix products and of a generator's weights.")] = "bfloat16",
    tokens: Annotated[int, typer.Option(min=64, help="trainer.token_budget: tokens per pass.")] = 16_384,
    width: Annotated[int, typer.Option(min=2, help="Tokens of a question plus its answer.")] = 1024,
    rank: Annotated[int, typer.Option(min=1, max=MOST_RANK, help="trainer.lora.rank.")] = 16,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of one trainer (torchrun).")] = 4,
) -> None:
    """Estimate the memory for training and generating from the model's configuration; no weights
    are loaded.
    """
    from swarm_cli.model.memory import check_named

    check_named(model, revision)
    import torch  # takes seconds, so a misspelt name is answered before it

    from swarm_cli.model.memory import configuration_of, memory_lines, model_memory

    found = model_memory(configuration_of(model, revision), getattr(torch, dtype), rank=rank, tokens=tokens, width=width, gpus=gpus)
    typer.echo("\n".join(memory_lines(found, dtype, tokens, width)))


@model_app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or the path of its folder.")],
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node whose policy to export.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist or be empty.")],
    best: Annotated[
        bool, typer.Option("--best", help="Export the checkpoint with the best evaluation instead of the newest.")
    ] = False,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype of the weights.  [default: model.dtype as in training]", show_default=False),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the LoRA adapters, as peft loads them.")] = False,
    var_dir: Annotated[Path, typer.Option(help="Folder with the runs.", envvar=VAR_DIR_VARIABLE)] = DEFAULT_VAR_DIR,
) -> None:
    """Write a trained policy as a Hugging Face folder that `transformers` loads, or its adapters
    for peft.
    """
    if adapter and dtype:
        raise CommandError("--adapter writes the adapters in float32, as they were trained: omit --dtype")
    folder = node_folder(find_run(run, var_dir), node)
    with unwinding_on_signals():
        exported = export_node(folder, out, best=best, dtype=dtype, adapter=adapter)
    tell_of_checkpoint(exported)
    if exported.rounding is not None:
        lost = max(0.0, exported.rounding.lost_ratio)
        remedy = "; --dtype float32 or --adapter keeps it" if lost >= 0.005 else ""
        note(f"adapters merged in float32; rounding to {exported.dtype} lost {lost:.0%} of what they add{remedy}")
    typer.echo(str(exported.folder))


def tell_of_checkpoint(exported: Exported) -> None:
    """Say which checkpoint the policy is of, and what its user may not expect of that."""
    for words in exported.notes:
        note(words)
    note(f"this is the policy after step {exported.step}")


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


def export_node(folder: Path, out: Path, *, best: bool = False, dtype: str | None = None, adapter: bool = False) -> Exported:
    """Export the newest (or best) checkpoint in a node's folder, or the checkpoint in `folder`
    itself.

    `services.trainer.export` documents what is written.

    Raises:
        CommandError: there is no usable checkpoint, the base model is missing, or `out` holds
        files.
    """
    from services.trainer.checkpoint import CheckpointError
    from services.trainer.export import export_adapter, export_policy
    from shared.model.configuration import ModelLoadError
    from shared.model.weights import WeightsError

    asked_with = _system_prompt(folder)
    try:
        if adapter:
            return export_adapter(folder, out, best=best, system_prompt=asked_with)
        return export_policy(folder, out, best=best, dtype=dtype, system_prompt=asked_with)
    except (CheckpointError, ModelLoadError, WeightsError, OSError, ValueError) as error:
        raise CommandError(f"nothing was exported: {error}") from None


def _system_prompt(node: Path) -> str:
    """That of the configuration with which the run in the folder around `node` was started; empty
    if it is not known.
    """
    try:
        config = started_with(node.resolve().parent)
        return "" if config is None else load_chosen(config, NodeConfig).model.system_prompt
    except (CommandError, OSError):
        return ""

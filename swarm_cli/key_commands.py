"""`swarm keys`: a node's identity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shared.config.verifier_section import ViewConfig
from shared.identity.keys import KeyFileError, SigningKey, create, load, new_seed
from swarm_cli.chosen_config import ConfigOption, load_chosen
from swarm_cli.console import note
from swarm_cli.errors import CommandError, checked_node

keys_app = typer.Typer(name="keys", help="A node's Ed25519 key: create one, or show its public key.", no_args_is_help=True)


@keys_app.command()
def new(
    out: Annotated[Path | None, typer.Option(help="File for the seed; readable only by its owner, never overwritten.")] = None,
    name: Annotated[
        str, typer.Option(help="The node's name: print the line for other nodes' rosters instead of only the key.")
    ] = "",
) -> None:
    """Create a key and print the public key; without --out, print the seed on the line above."""
    if name:
        checked_node(name)
    if out is None:
        seed = new_seed()
        typer.echo(seed.decode())
        key = SigningKey(seed)
    else:
        try:
            key = create(out)
        except KeyFileError as error:
            raise CommandError(str(error)) from None
        note(f"the seed is in {out}; use it as node.nk in a node's folder of the run, or as verifier.signing_key_file")
    typer.echo(_line(name, key.public_key))


@keys_app.command("show")
def show_key(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A key file.  [default: the configured node's]")] = None,
    node: Annotated[str, typer.Option(help="A node of the configured run.  [default: node.id]")] = "",
    config: ConfigOption = None,
) -> None:
    """Print the public key; with a node also its name, as a line for other nodes' rosters. Never
    prints the seed.
    """
    name = node
    if file is None:
        chosen = load_chosen(config, ViewConfig)
        given, name = chosen.verifier.signing_key_file, node or chosen.node.id
        file = Path(given) if given and not node else chosen.node.run_dir.parent / name / "node.nk"
    try:
        typer.echo(_line(name, load(file).public_key))
    except KeyFileError as error:
        raise CommandError(str(error)) from None


def _line(name: str, public_key: str) -> str:
    return f"{name} {public_key}" if name else public_key

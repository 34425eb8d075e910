"""`swarm keys` and `swarm roster`: a node's identity, and the nodes it admits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shared.config.verifier_section import ViewConfig
from shared.identity.keys import KeyFileError, SigningKey, create, is_public_key, load, new_seed
from shared.identity.roster import RosterEntry, RosterError, parse_roster, read_roster, write_roster
from shared.text import error_text, visible
from swarm_cli.chosen_config import ConfigOption, load_chosen
from swarm_cli.console import note, say
from swarm_cli.errors import CommandError, checked_node

keys_app = typer.Typer(name="keys", help="A node's Ed25519 key: create one, or show its public key.", no_args_is_help=True)
roster_app = typer.Typer(
    name="roster", help="The nodes admitted with verifier.trust = roster: lines of `name key [note]`.", no_args_is_help=True
)
FileOption = Annotated[Path | None, typer.Option("--file", help="The roster.  [default: verifier.roster_file]")]


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


@roster_app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The node's name.")],
    public_key: Annotated[
        str, typer.Argument(metavar="PUBLIC_KEY", help="Its public key, U..., printed by `swarm keys show` on that node.")
    ],
    remark: Annotated[str, typer.Option("--note", help="A note about the node.")] = "",
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Admit a node. Verifiers that use the file apply it within seconds."""
    path = _roster_file(file, config)
    entries = _entries(path, missing_is_empty=True)
    if name in entries and entries[name].public_key != public_key:
        raise CommandError(f"{name} is listed with another key: `swarm roster remove {name}` first if this is intended")
    if not is_public_key(public_key):
        raise CommandError(f"{public_key[:80]!r} is not a public key: `swarm keys show` prints one, U...")
    entries[name] = RosterEntry(name, public_key, visible(" ".join(remark.split("#", 1)[0].split())))
    try:
        parse_roster("\n".join(f"{each.name} {each.public_key} {each.note}" for each in entries.values()))
    except RosterError as error:
        raise CommandError(str(error)) from None
    _write(path, entries)


@roster_app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The node's name.")],
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Stop admitting a node."""
    path = _roster_file(file, config)
    entries = _entries(path)
    if entries.pop(name, None) is None:
        raise CommandError(f"{name} is not in {path}: `swarm roster list` shows who is")
    _write(path, entries)


@roster_app.command("list")
def list_roster(file: FileOption = None, config: ConfigOption = None) -> None:
    """Print the roster."""
    for entry in _entries(_roster_file(file, config)).values():
        say(visible(f"{entry.name} {entry.public_key} {entry.note}".rstrip()))


def _line(name: str, public_key: str) -> str:
    return f"{name} {public_key}" if name else public_key


def _roster_file(file: Path | None, config: Path | None) -> Path:
    return file or load_chosen(config, ViewConfig).verifier.roster_file


def _entries(path: Path, *, missing_is_empty: bool = False) -> dict[str, RosterEntry]:
    if missing_is_empty and not path.exists():
        return {}
    try:
        return read_roster(path)
    except RosterError as error:
        raise CommandError(str(error)) from None


def _write(path: Path, entries: dict[str, RosterEntry]) -> None:
    try:
        write_roster(path, entries)
    except OSError as error:
        raise CommandError(f"roster {path} cannot be written ({error_text(error)}): correct the path or its permissions") from None

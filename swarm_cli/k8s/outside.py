"""What `swarm k8s secrets` keeps in the key folder, because a later run without it would shut nodes
out: the cluster's nodes, the public keys of nodes outside it that only share, and the domain for
sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.os_words import in_words
from swarm_cli.errors import CommandError
from swarm_cli.nats.account_list import checked_domain, listed_nodes, named_node
from swarm_cli.replace_file import replace_file

NODES_FILE, GUESTS_FILE, DOMAIN_FILE = "nodes.txt", "guests.txt", "domain.txt"


def split_nodes(entries: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The nodes of the cluster, and the public keys of those outside it (NAME=U...).

    Raises:
        CommandError: an entry cannot be used, or a name is given both ways.
    """
    here: list[str] = []
    guests: dict[str, str] = {}
    for name, public_key in (named_node(part) for part in listed_nodes(entries)):
        if public_key is None:
            here.append(name)
        elif guests.get(name, public_key) != public_key:
            raise CommandError(f"--nodes gives two public keys to {name}: give one")
        else:
            guests[name] = public_key
    if both := sorted(set(here) & guests.keys()):
        raise CommandError(f"--nodes names {both[0]} with a public key and without: give it once")
    return here, guests


def remembered_nodes(folder: Path) -> list[str]:
    """The cluster's nodes, from the folder's file.

    Raises:
        CommandError: nobody has said which nodes there are, or a line of the file is not a name.
    """
    file = folder / NODES_FILE
    if not file.exists():
        raise CommandError(
            f"which nodes? Name all of the overlay with --nodes alpha,beta: {file}, which keeps them for later runs, does not exist"
        )
    try:
        here, guests = split_nodes(_text(file).split())
    except CommandError as error:
        raise CommandError(f"{file}: {error}") from None
    if guests or not here:
        raise CommandError(f"{file}: write the name of a node of the cluster on each line")
    return here


def remember(folder: Path, nodes: Sequence[str], guests: Mapping[str, str], domain: str) -> None:
    """Write them into the folder's files, once nothing can be refused any more."""
    kept = {
        NODES_FILE: "".join(f"{name}\n" for name in nodes),
        GUESTS_FILE: "".join(f"{name} {public_key}\n" for name, public_key in sorted(guests.items())),
        DOMAIN_FILE: f"{domain}\n" if domain else "",
    }
    for name, text in kept.items():
        if text or (folder / name).exists():
            replace_file(folder / name, text)


def remembered_guests(folder: Path, here: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The outside nodes in the folder's file, together with those `given`.

    Raises:
        CommandError: a line of the file cannot be used, names one of `here`, or has another key
            than is given.
    """
    file = folder / GUESTS_FILE
    lines = _text(file).splitlines()
    try:
        keyless, guests = split_nodes([line.strip().replace(" ", "=", 1) for line in lines if line.strip()])
    except CommandError as error:
        raise CommandError(f"{file}: {error}") from None
    if keyless:
        raise CommandError(f"{file}: {keyless[0]} has no public key: write `{keyless[0]} U...`, or remove the line")
    if other := sorted(name for name in guests.keys() & given.keys() if guests[name] != given[name]):
        raise CommandError(
            f"{file} has another key for {other[0]}, which would be shut out: to replace it, remove its line; for another node "
            "give another name"
        )
    guests = {**guests, **given}
    if both := sorted(set(here) & guests.keys()):
        remedy = "leave it out of --nodes, or remove its line to make its keys here"
        raise CommandError(f"{file} lists {both[0]} as a node outside the cluster: {remedy}")
    return guests


def remembered_domain(folder: Path, given: str) -> str:
    """The domain: `given`, or else the one in the folder's file. Raises CommandError if it is
    none.
    """
    file = folder / DOMAIN_FILE
    return given or checked_domain(_text(file).strip(), f"{file}:")


def _text(file: Path) -> str:
    """Empty if there is no file. Raises CommandError if it cannot be read."""
    try:
        return file.read_text() if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} cannot be read ({in_words(error)}): correct it, or remove it and give what it holds") from None

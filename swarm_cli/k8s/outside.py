"""What `swarm k8s secrets` keeps in the key folder, because a later run without it would shut nodes
out: the cluster's nodes, the public keys of nodes outside it that only share, and the domain for
sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from swarm_cli.errors import CommandError
from swarm_cli.nats.account_list import listed_nodes, named_node
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
        here, guests = split_nodes(file.read_text().split())
    except CommandError as error:
        raise CommandError(f"{file}: {error}") from None
    if guests or not here:
        raise CommandError(f"{file}: write the name of a node of the cluster on each line")
    return here


def remember_nodes(folder: Path, nodes: Sequence[str]) -> None:
    """Write them into the folder's file."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / NODES_FILE, "".join(f"{name}\n" for name in nodes))


def remembered_guests(folder: Path, here: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The outside nodes in the folder's file, together with those `given`, which are added to it.

    Raises:
        CommandError: a line of the file cannot be used, or names one of `here`.
    """
    file = folder / GUESTS_FILE
    lines = file.read_text().splitlines() if file.exists() else []
    try:
        keyless, guests = split_nodes([line.strip().replace(" ", "=", 1) for line in lines if line.strip()])
    except CommandError as error:
        raise CommandError(f"{file}: {error}") from None
    if keyless:
        raise CommandError(f"{file}: {keyless[0]} has no public key: write `{keyless[0]} U...`, or remove the line")
    guests = {**guests, **given}
    if both := sorted(set(here) & guests.keys()):
        remedy = "leave it out of --nodes, or remove its line to make its keys here"
        raise CommandError(f"{file} lists {both[0]} as a node outside the cluster: {remedy}")
    if given:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, "".join(f"{name} {public_key}\n" for name, public_key in sorted(guests.items())))
    return guests


def remembered_domain(folder: Path, given: str) -> str:
    """The domain: `given`, which is saved in the folder's file, or else the one in the file."""
    file = folder / DOMAIN_FILE
    if given:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, given + "\n")
    return given or (file.read_text().strip() if file.exists() else "")

"""The keys of a server's users, FOLDER/NODE/ROLE.nk, and the accounts made from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from shared.identity import keys
from shared.roles import OBSERVER, OPERATOR, ROLES, WATCH
from swarm_cli.errors import CommandError, checked_node
from swarm_cli.nats.server_config import MEMBER_CONNECTIONS, Account, Storage, node_account, swarm_account

NODE_KEYS = (*ROLES, OPERATOR, "swarm")
OPERATOR_KEYS = ("swarm", WATCH, OBSERVER)
"""Keys of the swarm plane's operator, in the folder `operator`."""


def key_file(folder: Path, node: str, name: str) -> Path:
    """The file of a key."""
    return folder / node / f"{name}.nk"


def make_missing_keys(folder: Path, node: str, names: Sequence[str]) -> dict[str, str]:
    """Create the missing key files of `node`. Returns the public keys of all `names`, by name.

    Raises:
        CommandError: `node` is not a valid name, or a file cannot be used.
    """
    try:
        return {name: keys.load_or_create(key_file(folder, checked_node(node), name)).public_key for name in names}
    except keys.KeyFileError as error:
        raise CommandError(str(error)) from None


class Plane(Enum):
    """The plane or planes of a server."""

    NODE = "node"
    SWARM = "swarm"
    BOTH = "both"


class Form(Enum):
    """The form of a server's accounts."""

    TEXT = "text"
    CLAIMS = "claims"


def accounts_for(
    plane: Plane,
    nodes: dict[str, str | None],
    folder: Path,
    node_connections: int = MEMBER_CONNECTIONS,
    storage: Storage | None = None,
) -> list[Account]:
    """The accounts of a server. `nodes`: names, each with a public key if only that is known, which
    is enough for the swarm plane. On a server with both planes such a node gets no node plane. With
    no `node_connections` the nodes are shut out, and need no key.
    """
    if OPERATOR in nodes:
        raise CommandError(f"no node may be called {OPERATOR!r}, the name of the user with all rights: rename the node")
    accounts: list[Account] = []
    if plane in (Plane.NODE, Plane.BOTH):
        users = (*ROLES, OPERATOR)
        here = [node for node, given in nodes.items() if plane is Plane.NODE or given is None]
        accounts += [
            node_account(node, {name: public_key_of(folder / node / f"{name}.nk") for name in users}, storage) for node in here
        ]
    if plane in (Plane.SWARM, Plane.BOTH):
        key_of = public_key_of if node_connections else key_if_there
        known = {node: given or key_of(folder / node / "swarm.nk") for node, given in nodes.items()}
        observer = key_if_there(folder / OPERATOR / f"{OBSERVER}.nk")
        if observer and OBSERVER in nodes:
            raise CommandError(f"no node may be called {OBSERVER!r} while {folder}/{OPERATOR}/{OBSERVER}.nk exists: move it away")
        operator = public_key_of(folder / OPERATOR / "swarm.nk")
        accounts.append(swarm_account({**known, OPERATOR: operator}, node_connections, observer))
    return accounts


def listed_nodes(entries: Sequence[str]) -> list[str]:
    """The names, or NAME=U..., of an option --nodes, which separates them by commas.

    Raises:
        CommandError: a name is empty, most likely because of a variable that is not set. Accounts
            without that node would shut it out.
    """
    for entry in entries:
        if not entry.strip():
            raise CommandError("--nodes is empty: name every node that the servers admit; if it is a variable, set it")
        if not all(part.strip() for part in entry.split(",")):
            raise CommandError(f"--nodes {entry[:80]!r} has an empty name between its commas: add the name, or remove the comma")
    return [part for entry in entries for part in entry.split(",")]


def checked_domain(name: str, where: str = "--domain") -> str:
    """Return `name`. Raises CommandError if it is not a JetStream domain that nats.swarm_domain can
    name. where: what gave it, for the message.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]*", name):
        raise CommandError(f"{where} {name[:80]!r} is no JetStream domain: use letters, digits, hyphens and underscores")
    return name


def named_node(entry: str) -> tuple[str, str | None]:
    """The name and, for NAME=U..., the public key. Raises CommandError if either is not valid."""
    name, given, public_key = entry.partition("=")
    if given and not public_key:
        raise CommandError(f"{entry!r} has no public key: write NAME=U..., or NAME alone for a node with keys in the folder")
    if public_key and not keys.is_public_key(public_key):
        raise CommandError(
            f"{public_key[:80]!r} is not a user's public key, which has 56 characters, begins with U and ends with a checksum: "
            "copy it again"
        )
    return checked_node(name), public_key or None


def key_if_there(path: Path) -> str:
    """The public key of a key file; empty if the file does not exist."""
    return public_key_of(path) if path.exists() else ""


def public_key_of(path: Path) -> str:
    """The public key of a key file. Raises CommandError if the file is missing or holds no key."""
    if not path.exists():
        raise CommandError(f"key file {path} does not exist: make it with `swarm nats keys {path.parent.name}`")
    try:
        return keys.load_or_create(path).public_key
    except keys.KeyFileError as error:
        raise CommandError(str(error)) from None

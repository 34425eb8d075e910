"""The folder of a swarm's NATS keys: FOLDER/NODE/ROLE.nk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.identity import keys
from shared.identity.permissions import OBSERVER, OPERATOR, WATCH
from shared.roles import ROLES
from swarm_cli.errors import CommandError, checked_node

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

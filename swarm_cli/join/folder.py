"""The folder in which `swarm join` keeps a swarm's files: which hub it is, keys, the hub's
authority, the roster, and the node's configuration. `swarm join` keeps nothing else, and never
replaces a key.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config.load import MAX_FILE_BYTES
from shared.contracts.wire import is_node_name
from shared.identity import keys
from shared.identity.keys import KeyFileError, SigningKey
from shared.identity.roster import RosterEntry, RosterError, read_roster, write_roster
from shared.os_words import in_words
from shared.plain_files import read_plain
from swarm_cli.errors import CommandError
from swarm_cli.invitation.token import Credential, Invitation, Member
from swarm_cli.join.membership import bind, confirm
from swarm_cli.replace_file import replace_file


@dataclass(frozen=True, slots=True)
class JoinFolder:
    """`var/joined/<swarm>/`. A swarm's name has no character that could lead to another folder."""

    path: Path

    @property
    def hub_file(self) -> Path:
        """Says which hub the other files belong to (`membership`)."""
        return self.path / "hub.json"

    @property
    def signing_key_file(self) -> Path:
        """The key that signs this node's messages to the swarm: its identity there."""
        return self.path / "node.nk"

    @property
    def hub_key_file(self) -> Path:
        """The key that this node authenticates with at the hub."""
        return self.path / "swarm.nk"

    @property
    def authority_file(self) -> Path:
        """Certificates of the authority that signed the hub's."""
        return self.path / "hub-ca.pem"

    @property
    def roster_file(self) -> Path:
        """The nodes that this node admits."""
        return self.path / "roster.txt"

    @property
    def config_file(self) -> Path:
        """The node's configuration, once it has joined."""
        return self.path / "node.toml"

    def bind(self, invitation: Invitation) -> None:
        """Bind the folder to the token's hub, or check that it is. Raises CommandError if it
        belongs to another hub: then nothing in it may be used with this token.
        """
        bind(self.hub_file, self.authority_file, invitation, made=self.signing_key_file.exists() or self.hub_key_file.exists())

    def confirm(self) -> None:
        """Record that the folder's hub answered. Raises CommandError."""
        confirm(self.hub_file)

    def known_name(self) -> str:
        """The name under which this node joined before; empty if it never did or the file cannot be
        read.
        """
        node = self._joined_with().get("node")
        name = node.get("id") if isinstance(node, dict) else None
        return name if isinstance(name, str) and is_node_name(name) else ""

    def known_tasks(self) -> list[dict[str, Any]]:
        """The `[[tasks]]` that this node joined with before; empty if it never did or the file
        cannot be read.
        """
        tasks = self._joined_with().get("tasks")
        return tasks if isinstance(tasks, list) and all(isinstance(each, dict) for each in tasks) else []

    def _joined_with(self) -> dict[str, Any]:
        try:
            return tomllib.loads(read_plain(self.config_file, MAX_FILE_BYTES).decode())
        except (OSError, ValueError, RecursionError):
            return {}

    def signing_key(self) -> SigningKey:
        """The node's key, made the first time. Raises CommandError."""
        return _made(self.signing_key_file)

    def hub_key(self, credential: Credential | None) -> SigningKey:
        """The key for the hub: the token's, or one made here, whose public half the operator has to
        list.

        Raises:
            CommandError: another key is there already, or the file cannot be used.
        """
        if credential is not None and not self.hub_key_file.exists():
            try:
                return keys.create(self.hub_key_file, credential.seed.encode())
            except KeyFileError as error:
                raise CommandError(str(error)) from None
        key = _made(self.hub_key_file)
        if credential is not None and key.public_key != SigningKey(credential.seed.encode()).public_key:
            raise CommandError(
                f"{self.hub_key_file} holds another key than the token, and keys are never replaced: if the token's is right, move "
                f"the file away; else ask for a token without a key"
            )
        return key

    def keep_authority(self, certificates: bytes) -> None:
        """Write the hub's authority. Raises CommandError."""
        self._prepare()
        replace_file(self.authority_file, certificates.decode())

    def keep_roster(self, members: list[Member]) -> list[Member]:
        """Add the token's lines to the roster and keep the existing ones; returns the added ones,
        because whoever is told of no new line would not notice one that any member may have put
        into a token. Raises CommandError, as `grown_roster` does.
        """
        self._prepare()
        grown = self.grown_roster(members)
        try:
            before = set(read_roster(self.roster_file)) if self.roster_file.exists() else set[str]()
            write_roster(self.roster_file, grown)
            return [member for member in members if member.node not in before]
        except RosterError as error:
            raise CommandError(str(error)) from None
        except OSError as error:
            raise CommandError(_unusable(self.roster_file, error)) from None

    def lines_to_ask_about(self, members: list[Member], own_key: str) -> list[Member]:
        """Those of a later token's lines that would change whom this node admits; none in a folder
        that no node has joined from. The node's line for itself (`own_key`) is no change.

        Raises:
            CommandError: as `grown_roster`.
        """
        if not self.roster_file.exists() and not self.config_file.exists():
            return []
        try:
            known = read_roster(self.roster_file) if self.roster_file.exists() else {}
        except (RosterError, OSError) as error:
            raise CommandError(_unusable(self.roster_file, error) if isinstance(error, OSError) else str(error)) from None
        return [member for member in members if member.node not in known and member.public_key != own_key]

    def grown_roster(self, members: list[Member]) -> dict[str, RosterEntry]:
        """The roster's lines together with the token's; writes nothing.

        Raises:
            CommandError: a name has another key here than in the token, or the file cannot be used.
        """
        try:
            known = dict(read_roster(self.roster_file)) if self.roster_file.exists() else {}
        except RosterError as error:
            raise CommandError(str(error)) from None
        except OSError as error:
            raise CommandError(_unusable(self.roster_file, error)) from None
        for member in members:
            if member.node in known and known[member.node].public_key != member.public_key:
                raise CommandError(
                    f"{self.roster_file} has another key for {member.node} than the token: ask the operator which is right, "
                    f"then `swarm roster remove {member.node} --file {self.roster_file}` or another token"
                )
            known.setdefault(member.node, RosterEntry(member.node, member.public_key))
        return known

    def _prepare(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"{self.path} cannot be made ({error.strerror}): set node.var_dir to a writable folder") from None


def _unusable(file: Path, error: OSError) -> str:
    return f"{file} cannot be used ({in_words(error)}): let this user read and write it, or set node.var_dir to another folder"


def _made(path: Path) -> SigningKey:
    try:
        return keys.load_or_create(path)
    except KeyFileError as error:
        raise CommandError(str(error)) from None

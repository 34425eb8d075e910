"""What `swarm join` keeps of a swarm on this machine: which hub it is, keys, the hub's authority,
the roster, and the node's configuration. Nothing else is written by it, and no key is ever
replaced.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from shared.contracts.wire import is_node_name
from shared.identity import keys
from shared.identity.keys import KeyFileError, SigningKey
from shared.identity.roster import RosterEntry, RosterError, read_roster, write_roster
from swarm_cli.errors import CommandError
from swarm_cli.invitation.token import Credential, Invitation, Member
from swarm_cli.join.membership import bind
from swarm_cli.replace_file import replace_file


@dataclass(frozen=True, slots=True)
class JoinFolder:
    """`var/joined/<swarm>/`. The swarm's name has no character that leads elsewhere."""

    path: Path

    @property
    def hub_file(self) -> Path:
        """Which hub all the others belong to (`membership`)."""
        return self.path / "hub.json"

    @property
    def signing_key_file(self) -> Path:
        """The key that signs what this node shares: its identity in the swarm."""
        return self.path / "node.nk"

    @property
    def hub_key_file(self) -> Path:
        """The key that the hub lets in."""
        return self.path / "swarm.nk"

    @property
    def authority_file(self) -> Path:
        """Certificates behind the hub's."""
        return self.path / "hub-ca.pem"

    @property
    def roster_file(self) -> Path:
        """Whom this node admits."""
        return self.path / "roster.txt"

    @property
    def config_file(self) -> Path:
        """The node's configuration, once it has joined."""
        return self.path / "node.toml"

    def bind(self, invitation: Invitation) -> None:
        """Make the folder the token's hub's, or find that it is. Raises CommandError where it is
        another's: nothing there may be used with this token.
        """
        bind(self.hub_file, invitation, made=self.signing_key_file.exists() or self.hub_key_file.exists())

    def known_name(self) -> str:
        """The name under which this node joined before; empty: never. A file that cannot be read
        says nothing.
        """
        try:
            name = tomllib.loads(self.config_file.read_text())["node"]["id"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        return name if isinstance(name, str) and is_node_name(name) else ""

    def signing_key(self) -> SigningKey:
        """The node's key, made the first time. Raises CommandError."""
        return _made(self.signing_key_file)

    def hub_key(self, credential: Credential | None) -> SigningKey:
        """The key for the hub: the token's, or one made here whose public half the operator lists.

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
                f"{self.hub_key_file} holds another key than the token: a key is not replaced; if the token's is the right one, "
                f"move the file away, else ask for a token without a key"
            )
        return key

    def keep_authority(self, certificates: bytes) -> None:
        """Write the hub's authority. Raises CommandError."""
        self._prepare()
        replace_file(self.authority_file, certificates.decode())

    def keep_roster(self, members: list[Member]) -> None:
        """Add the token's lines to the roster; those that are there stay. Raises CommandError, as
        `grown_roster`.
        """
        self._prepare()
        try:
            write_roster(self.roster_file, self.grown_roster(members))
        except (RosterError, OSError) as error:
            raise CommandError(str(error)) from None

    def grown_roster(self, members: list[Member]) -> dict[str, RosterEntry]:
        """The roster's lines and the token's, without writing them.

        Raises:
            CommandError: a name has another key here than in the token, or the file cannot be used.
        """
        try:
            known = dict(read_roster(self.roster_file)) if self.roster_file.exists() else {}
        except (RosterError, OSError) as error:
            raise CommandError(str(error)) from None
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
            raise CommandError(f"{self.path} cannot be made ({error.strerror}): set node.var_dir to a folder of your own") from None


def _made(path: Path) -> SigningKey:
    try:
        return keys.load_or_create(path)
    except KeyFileError as error:
        raise CommandError(str(error)) from None

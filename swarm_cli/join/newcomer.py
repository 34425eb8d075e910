"""A newcomer's files and configuration: the folder that binds it to one hub, its keys and roster,
its name, and the settings that joining decides.
"""

from __future__ import annotations

import hashlib
import re
import socket
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cryptography import x509
from msgspec import Meta
from msgspec.structs import replace

from shared.atomic_files import create_once
from shared.config import NodeConfig, TaskSpec, load_config
from shared.config.load import MAX_FILE_BYTES
from shared.contracts.wire import Message, MessageError, is_node_name
from shared.identity import keys
from shared.identity.keys import KeyFileError, SigningKey
from shared.identity.roster import RosterEntry, RosterError, read_roster, write_roster
from shared.plain_files import read_plain
from shared.run_records import saved_step
from shared.text import error_text, visible
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.invitation import Credential, Invitation, Member, task_specs
from swarm_cli.local.base_model import TOY_MARK
from swarm_cli.replace_file import replace_file

_MOST_BYTES = 65_536


class HubIdentity(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hub as a token names it. `authority`: SHA-256 of its authority's certificates; empty if the
    system's authorities are used. `reached`: whether it ever answered this folder's keys.

    A person may write the file, so a field that is not known is an error.
    """

    url: Annotated[str, Meta(max_length=1024)]
    authority: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    reached: bool = True


def _trusts_less(file: Path, known: HubIdentity, invitation: Invitation) -> bool:
    """Return whether each certificate of the token is one of those that the folder trusts already,
    the newest among them: an older token, made before the newest was added, would take that away.
    """
    try:
        trusted = read_plain(file, _MOST_BYTES)
    except OSError:  # there is none, or nothing that could be the authority's certificates
        return False
    if not invitation.authority or hashlib.sha256(trusted).hexdigest() != known.authority:
        return False
    try:
        before, later = (x509.load_pem_x509_certificates(text) for text in (trusted, invitation.authority))
    except ValueError:
        return False
    return set(later) <= set(before) and max(before, key=lambda each: each.not_valid_before_utc) in later


def _read(file: Path) -> HubIdentity:
    """JSON, so that a person can write it when the hub changes. Raises OSError and MessageError."""
    try:
        return msgspec.json.decode(read_plain(file, _MOST_BYTES), type=HubIdentity)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError("malformed", str(error)[:200]) from None


def _told(hub: HubIdentity) -> str:
    return f"{hub.url} ({f'authority {hub.authority}' if hub.authority else 'no authority of its own'})"


@dataclass(frozen=True, slots=True)
class JoinFolder:
    """`var/joined/<swarm>/`. A swarm's name has no character that could lead to another folder."""

    path: Path

    @property
    def hub_file(self) -> Path:
        """Says which hub the other files belong to (`HubIdentity`)."""
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
        """Record the token's hub, or check that it is the hub recorded here: nothing in the folder
        may be used with another hub's token.

        A hub that never answered, as one at a mistyped address, knows no key, and is replaced by
        the token's. So is a known hub's authority, if the token only takes older certificates away:
        an operator who replaces it distributes the old and the new one first, and later the new one
        alone. Without a record, keys that are here belong to an unknown hub.

        Raises:
            CommandError: the folder belongs to another hub, or the file cannot be used.
        """
        file, certificates = self.hub_file, invitation.authority
        authority = hashlib.sha256(certificates).hexdigest() if certificates else ""
        wanted = HubIdentity(url=invitation.url, authority=authority, reached=False)
        remedy = (
            f"keys are for one hub only. To join another swarm, move {self.path} away or set SWARM_NODE__VAR_DIR to another "
            "folder, or ask for a token for a swarm with another name (nats.swarm_id). If the hub itself has a new address or "
            'authority, see "When the hub changes" in docs/joining.md'
        )
        try:
            if not file.exists():
                if self.signing_key_file.exists() or self.hub_key_file.exists():
                    raise CommandError(f"{self.path} holds keys, but {file.name}, which names their hub, is missing: {remedy}")
                # If two commands run at once, the first one's file stays, and both read it.
                create_once(file, msgspec.json.encode(wanted))
            known = _read(file)
            less = known.url == wanted.url and _trusts_less(self.authority_file, known, invitation)
            if known != wanted and (not known.reached or (known.authority != wanted.authority and less)):
                known = replace(wanted, reached=known.reached)
                replace_file(file, msgspec.json.encode(known).decode())
        except OSError as error:
            raise CommandError(
                f"{file} cannot be used ({error_text(error)}): move it away if it is no file, or set node.var_dir to a "
                "writable folder"
            ) from None
        except MessageError as error:
            raise CommandError(f"{file} does not name a hub ({error}): {remedy}") from None
        if (known.url, known.authority) != (wanted.url, wanted.authority):
            raise CommandError(f"{self.path} belongs to {_told(known)}, and the token is for {_told(wanted)}: {remedy}")

    def confirm(self) -> None:
        """Record that the folder's hub answered: from now on the folder is for it alone. Raises
        CommandError if the file cannot be written.
        """
        known = _read(self.hub_file)
        if not known.reached:
            replace_file(self.hub_file, msgspec.json.encode(replace(known, reached=True)).decode())

    def known_name(self) -> str:
        """The name under which this node joined before; empty if it never did. Its run tells
        it too, since other nodes know the key by that name and refuse it under another.

        Raises:
            CommandError: the file cannot be read, or names another node than the run.
        """
        node = self._joined_with().get("node")
        name = node.get("id") if isinstance(node, dict) else None
        told = name if isinstance(name, str) and is_node_name(name) else ""
        trained = self._trained_as()
        if told and trained and told not in trained:
            raise CommandError(
                f"{self.config_file} names the node {told}, and its run has trained as {' and '.join(trained)}: other nodes "
                "know its key by that name: correct `id`"
            )
        if not told and len(trained) > 1:
            raise CommandError(
                f"{self.config_file} names no node, and its run has trained as {' and '.join(trained)}: say which with --name"
            )
        return told or (trained[0] if trained else "")

    def known_tasks(self) -> list[dict[str, Any]]:
        """The `[[tasks]]` that this node joined with before; empty if it never did.

        Raises:
            CommandError: the file cannot be read, or has no valid tasks any more.
        """
        tasks: list[dict[str, Any]] = self._joined_with().get("tasks", [])
        try:
            for each in tasks:
                TaskSpec.model_validate(each)
            return tasks
        except (ValueError, TypeError) as error:
            raise self._broken(error_text(error)) from None

    def _trained_as(self) -> list[str]:
        """The nodes with a checkpoint in the run of this folder's swarm."""
        run = self.path.parent.parent / "runs" / run_name(self.path.name)
        return sorted(folder.name for folder in run.glob("*") if is_node_name(folder.name) and saved_step(folder))

    def _joined_with(self) -> dict[str, Any]:
        try:
            return tomllib.loads(read_plain(self.config_file, MAX_FILE_BYTES).decode())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise self._broken(error_text(error)) from None

    def _broken(self, why: str) -> CommandError:
        return CommandError(
            f"{self.config_file}, which this node joined with, cannot be used ({why}): restore it, or move it away to join again "
            "with the same key and name"
        )

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
        before, grown = self._roster(), self.grown_roster(members)
        try:
            write_roster(self.roster_file, grown)
        except RosterError as error:
            raise CommandError(str(error)) from None
        except OSError as error:
            raise CommandError(_unusable(self.roster_file, error)) from None
        return [member for member in members if member.node not in before]

    def lines_to_ask_about(self, members: list[Member], own_key: str) -> list[Member]:
        """Those of a later token's lines that would change whom this node admits; none in a folder
        that no node has joined from. The node's line for itself (`own_key`) is no change. Raises
        CommandError.
        """
        if not self.roster_file.exists() and not self.config_file.exists():
            return []
        known = self._roster()
        return [member for member in members if member.node not in known and member.public_key != own_key]

    def grown_roster(self, members: list[Member]) -> dict[str, RosterEntry]:
        """The roster's lines together with the token's; writes nothing.

        Raises:
            CommandError: a name has another key here than in the token, or the file cannot be used.
        """
        known = self._roster()
        for member in members:
            if known.setdefault(member.node, RosterEntry(member.node, member.public_key)).public_key != member.public_key:
                raise CommandError(
                    f"{self.roster_file} has another key for {member.node} than the token: ask the operator which is right, "
                    f"then `swarm roster remove {member.node} --file {self.roster_file}` or another token"
                )
        return known

    def _roster(self) -> dict[str, RosterEntry]:
        try:
            return dict(read_roster(self.roster_file)) if self.roster_file.exists() else {}
        except RosterError as error:
            raise CommandError(str(error)) from None
        except OSError as error:
            raise CommandError(_unusable(self.roster_file, error)) from None

    def _prepare(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"{self.path} cannot be made ({error.strerror}): set node.var_dir to a writable folder") from None


def _unusable(file: Path, error: OSError) -> str:
    return f"{file} cannot be used ({error_text(error)}): let this user read and write it, or set node.var_dir to another folder"


def _made(path: Path) -> SigningKey:
    try:
        return keys.load_or_create(path)
    except KeyFileError as error:
        raise CommandError(str(error)) from None


_SUFFIX_CHARS = 6
_NAME_CHARS = 32


def default_name(hostname: str, public_key: str) -> str:
    """A valid name that no two newcomers share: the host's name and the end of the node's key.

    >>> default_name("Ada's Laptop.local", "UABCDEFGH")
    'ada-s-laptop-cdefgh'
    """
    suffix = public_key[-_SUFFIX_CHARS:].lower()
    host = re.sub(r"[^a-z0-9]+", "-", hostname.partition(".")[0].lower()).strip("-") or "node"
    return f"{host[: _NAME_CHARS - len(suffix) - 1].rstrip('-')}-{suffix}"


def chosen_name(asked: str, invitation: Invitation, folder: JoinFolder, public_key: str) -> str:
    """The node's name. A key keeps one name for good: other nodes refuse it under a second one.

    Raises:
        CommandError: `asked` differs from the token's name or from the name used before.
    """
    given = invitation.credential.user if invitation.credential else ""
    if asked and given and asked != given:
        raise CommandError(f"the token is for a node called {given}: omit --name, or ask for a token for {asked}")
    known, wanted = folder.known_name(), given or asked
    if known and wanted and known != wanted:
        raise CommandError(
            f"this machine joined {invitation.swarm_id} as {known}, and other nodes know its key by that name: omit --name, or "
            f"move {folder.path} away to join as {wanted} with a new key"
        )
    return wanted or known or default_name(socket.gethostname(), public_key)


def task_entries(asked: str, invitation: Invitation) -> list[dict[str, Any]]:
    """The `[[tasks]]` for the names in `asked`, as the token offers them or else with the dataset's
    default settings; all of the token's if `asked` is empty. Raises CommandError if no node can use
    what the token offers.
    """
    offered: list[dict[str, Any]] = task_specs(invitation)
    try:
        for each in offered:
            TaskSpec.model_validate(each)
    except ValueError:
        raise CommandError("a task in the token has invalid settings: ask for another token") from None
    if not asked:
        return offered
    names = [name.strip() for name in asked.split(",") if name.strip()]
    return [entry for name in names for entry in [e for e in offered if e["dataset"] == name] or [{"dataset": name}]]


def kept_tasks(offered: list[dict[str, Any]], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tasks that a node joined with before, because a later token does not decide what it
    trains on; `offered` if it has not joined yet. Says what the token offers instead.
    """
    if not known:
        return offered
    if _sources(known) != _sources(offered):
        names = ",".join(dict.fromkeys(entry["dataset"] for entry in offered))
        kept = ", ".join(dict.fromkeys(visible(str(entry.get("dataset") or entry.get("path")), 80) for entry in known))
        note(f"this node keeps the tasks that it joined with ({kept}); the token offers others: to take them, add --tasks {names}")
    return known


def _sources(entries: list[dict[str, Any]]) -> list[tuple[str, str, float, str]]:
    """Return what the tasks depend on and how often they are drawn. Empty if they are not valid,
    which is told where they are used.
    """
    try:
        specs = [TaskSpec.model_validate(entry) for entry in entries]
    except ValueError:
        return []
    return sorted((spec.dataset or spec.path, spec.canonical_config, spec.weight, spec.verifier) for spec in specs)


def base_config(config: Path | None, model: str) -> Path | None:
    """The file that the node's configuration is based on: the one given; the demo's for the toy
    policy, because its learning rate and lengths suit no other; None, the defaults, for any other
    model.
    """
    if config is not None:
        return config
    return DEMO_CONFIG if not model or (Path(model) / TOY_MARK).is_file() else None


def node_settings(
    invitation: Invitation, folder: JoinFolder, name: str, *, model: str, revision: str, tasks: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The settings that joining decides; they override the base configuration. `tasks` empty: the
    base configuration's are kept.
    """
    nats: dict[str, Any] = {
        "swarm_url": invitation.url,
        "swarm_id": invitation.swarm_id,
        # The node may make streams on its own server; the swarm's are only made if missing.
        "create_streams": True,
        # A key that the configuration file names is for another server and must not be used with
        # this one.
        "swarm_key_file": "",
        "swarm_ca_file": "",
    }
    if invitation.url.startswith("tls://"):
        nats["swarm_key_file"] = str(folder.hub_key_file)
        nats["swarm_ca_file"] = str(folder.authority_file) if invitation.authority else ""
    settings: dict[str, Any] = {
        "node": {"id": name, "run": run_name(invitation.swarm_id)},
        "nats": nats,
        "verifier": {"signing_key_file": str(folder.signing_key_file)},
    }
    if invitation.roster or folder.roster_file.exists():  # a token without a roster must not remove an earlier one
        settings["verifier"] |= {"trust": "roster", "roster_file": str(folder.roster_file)}
    if model:
        settings["model"] = {"path": model, "revision": revision}
    if tasks:
        settings["tasks"] = list(tasks)
    return settings


def run_name(swarm_id: str) -> str:
    """The run that holds a joined node's files."""
    return f"join-{swarm_id}"[:64]


def first_look(config: Path | None, tasks: Sequence[dict[str, Any]]) -> NodeConfig:
    """The configuration before the folder and the name are known; it says where files go."""
    return load_config(config, {"tasks": list(tasks)} if tasks else None)

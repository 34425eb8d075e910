"""The configuration file of a secured NATS server, rendered from users' public keys and `shared.permissions`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.permissions import EVERYTHING, OPERATOR, ROLES, Permissions, node_role, swarm_node


@dataclass(frozen=True, slots=True)
class User:
    """One user: a name for the reader, its public nkey, what it may do."""

    name: str
    public_key: str
    permissions: Permissions


@dataclass(frozen=True, slots=True)
class Account:
    """Users that share streams. Accounts on one server see nothing of each other."""

    name: str
    users: tuple[User, ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files as the server finds them."""

    cert_file: str
    key_file: str


def swarm_account(keys: Mapping[str, str]) -> Account:
    """The swarm plane: a user per node, and perhaps `operator`. `keys` are public keys by name."""
    return Account("SWARM", tuple(User(name, key, _swarm_permissions(name)) for name, key in keys.items()))


def node_account(node: str, keys: Mapping[str, str]) -> Account:
    """A node's plane: a user per role, and perhaps `operator`. Raises ValueError for a name that is neither."""
    users = tuple(
        User(name, key, EVERYTHING if name == OPERATOR else node_role(node, name)) for name, key in sorted(keys.items(), key=_order)
    )
    return Account(f"NODE_{node.upper()}", users)


def render(accounts: Sequence[Account], *, tls: Tls | None, host: str, port: int, sync_interval: str) -> str:
    """The file. Without `tls` only for loopback: keys are never sent, but everything else could be read and changed on the way."""
    lines = [
        "# Written by `swarm nats config`. After a change of nodes: write it again, then `nats-server --signal reload`.",
        f"host: {_quoted(host)}",
        f"port: {port}",
        "max_payload: 8MB",
        "max_pending: 256MB",
        *_jetstream(sync_interval),
        "# nats-py 2.16 cannot read the second format of acknowledgements.",
        "feature_flags { js_ack_fc_v2: false }",
        *_tls(tls),
        *_accounts(accounts),
    ]
    return "\n".join(lines) + "\n"


def render_accounts(accounts: Sequence[Account]) -> str:
    """The accounts alone, for `include` in a file that says the rest, as the one of `k8s/base/nats` does."""
    lines = [
        "# Written by `swarm nats config --accounts-only`. After a change of nodes: write it again, then have the server reload.",
        *_accounts(accounts),
    ]
    return "\n".join(lines) + "\n"


def _accounts(accounts: Sequence[Account]) -> list[str]:
    lines = ["accounts {"]
    for account in accounts:
        lines += [f"  {account.name} {{", "    jetstream: enabled", "    users: ["]
        for user in account.users:
            lines += _user(user)
        lines += ["    ]", "  }"]
    return [*lines, "}"]


def _swarm_permissions(name: str) -> Permissions:
    return EVERYTHING if name == OPERATOR else swarm_node(name)


def _order(item: tuple[str, str]) -> int:
    return ROLES.index(item[0]) if item[0] in ROLES else len(ROLES)


def _jetstream(sync_interval: str) -> list[str]:
    return ["jetstream {", "  max_file_store: 1TB", f"  sync_interval: {sync_interval}", "}"]


def _tls(tls: Tls | None) -> list[str]:
    if tls is None:
        return []
    return ["tls {", f"  cert_file: {_quoted(tls.cert_file)}", f"  key_file: {_quoted(tls.key_file)}", "  timeout: 5", "}"]


def _user(user: User) -> list[str]:
    return [
        f"      {{ # {user.name}",
        f"        nkey: {user.public_key}",
        "        permissions {",
        *_allowed("publish", user.permissions.publish),
        *_allowed("subscribe", user.permissions.subscribe),
        "        }",
        "      }",
    ]


def _allowed(verb: str, subjects: Sequence[str]) -> list[str]:
    return [f"          {verb}: {{ allow: [", *(f"            {_quoted(subject)}" for subject in subjects), "          ] }"]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

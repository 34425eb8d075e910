"""Accounts of a secured server: streams and their operator share one account, and every other user
has its own. Pure.

Why: a user's permissions limit what it may publish and receive, but the server sends a reply to any
subject that the requester names, with the server's permissions, and the reply can be bytes that the
requester stored (direct get). Separate accounts prevent this: a request passes through a *service
import*, the server replaces the requester's reply subject with its own, and the reply is published
in the requester's account, which has no JetStream and where the requester can do nothing new with
it. So a user's imports are exactly its permissions.

Requests that the server itself answers (`STREAM.INFO` and the like) depend on the account they come
from. Every account, even one without JetStream, has the server's import of `$JS.API.>`, which would
answer "not enabled" before the account with the streams does. So these requests are imported under
another name (`API.STREAM.INFO.X`), and a mapping translates the subject that clients use
(`$JS.API.STREAM.INFO.X`).

The server does not pass on to a *stream import* what arrived by a service import. So a user that
watches a key subscribes directly to the account of its writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shared.identity.permissions import (
    ADVISORY,
    EVERYTHING,
    OBSERVER,
    OPERATOR,
    WATCH,
    Permissions,
    node_role,
    swarm_node,
    swarm_observer,
)
from shared.roles import ROLES
from swarm_cli.nats.storage import Storage

MAX_CONNECTIONS_VARIABLE = "swarm_max_connections"
"""A variable that only the accounts' lines define, for a server setting that a reload may change;
its value is the server's default.
"""
MAX_CONNECTIONS = 65536
WATCH_ACCOUNT = "WATCH"
MAX_PAYLOAD = 8 * 2**20
"""As the servers have it, so that a server that takes more gives its members no more: a message
that one server takes and the next does not would be lost between them.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a server's resources per key. An account's connections are counted over all servers
    of a cluster.

    Why: the server limits the unread data of one connection (`max_pending`), so a key can hold
    `connections` times that, plus an entry in memory for each subscription. In addition, replies to
    direct gets wait in an unbounded queue of the stream: each connection's requests fill it at the
    speed of a core, and one goroutine drains it (`getDirectRequest`, nats-server 2.15).
    """

    connections: int
    subscriptions: int
    """Per connection; a site's leaf connection includes those of all its services."""
    leaves: int = 0
    """Leaf connections; they do not count among `connections`."""
    payload: int = MAX_PAYLOAD
    """Bytes of a message."""


MEMBER_CONNECTIONS = 4
"""One verifier; its old connection after a network failure, which the server considers alive for
minutes; a rolling update; an operator's command.
"""
MEMBER_SUBSCRIPTIONS = 1024
"""One a reply that has many parts: at most about 80 at once a verifier, so 640 of 8 verifiers
behind one leaf.
"""
MEMBER_LEAVES = 4
"""A site's cluster of three, and one of before."""
OBSERVER_LIMITS = Limits(connections=16, subscriptions=1024, payload=64 * 1024)
"""All spectators together, who share one key. They send nothing but requests."""
ROLE_LIMITS = Limits(connections=256, subscriptions=1024)
"""A role on its node's plane: trusted, and generators may be many. It stops what has gone wrong and
connects without end.
"""

_API = "$JS.API."
_ANSWERED_BY_STREAMS = ("$JS.API.DIRECT.GET.", "$JS.API.CONSUMER.MSG.NEXT.")
"""Not answered by the server but by the stream or consumer: no other name is needed, and one
request may have many answers.
"""


@dataclass(frozen=True, slots=True)
class User:
    """One user: a name for the reader, its public nkey, what it may do."""

    name: str
    public_key: str
    permissions: Permissions
    limits: Limits | None = None
    """None: as all guests of its account."""


@dataclass(frozen=True, slots=True)
class Account:
    """Streams and who uses them. Operators are in it; every other user is given an account beside
    it (`guest_account`).
    """

    name: str
    users: tuple[User, ...]
    limits: Limits
    """Of each guest."""
    storage: Storage | None = None
    """Of all its streams together; None: as much as the server has."""

    @property
    def operators(self) -> tuple[User, ...]:
        """Users with all rights, in the account itself."""
        return tuple(user for user in self.users if user.permissions == EVERYTHING)

    @property
    def guests(self) -> tuple[User, ...]:
        """Users with some rights, each in an account of its own."""
        return tuple(user for user in self.users if user.permissions != EVERYTHING)


@dataclass(frozen=True, slots=True)
class UpstreamNode:
    """A node of a site on its way to the swarm, and the public half of its swarm key."""

    name: str
    public_key: str

    @property
    def seed_variable(self) -> str:
        """Environment variable in which the server finds the seed: it takes no file, and a
        configuration holds no secrets.
        """
        return f"SWARM_KEY_{self.name.upper().replace('-', '_')}"


@dataclass(frozen=True, slots=True)
class Upstream:
    """The hub of a site's server. Each node connects with its own key, so that the hub holds the
    site to that node's account.
    """

    url: str
    domain: str
    ca_file: str
    nodes: tuple[UpstreamNode, ...]


def swarm_account(keys: Mapping[str, str], connections: int = MEMBER_CONNECTIONS, observer_key: str = "") -> Account:
    """The swarm plane: a user per node, and perhaps `operator`. `keys` are public keys by name,
    `connections` those of a node, `observer_key` that of all spectators together; empty: none.
    """
    users = [User(name, key, EVERYTHING if name == OPERATOR else swarm_node(name)) for name, key in keys.items()]
    if observer_key:
        users.append(User(OBSERVER, observer_key, swarm_observer(), OBSERVER_LIMITS))
    return Account("SWARM", tuple(users), Limits(connections, MEMBER_SUBSCRIPTIONS, MEMBER_LEAVES))


def node_account(node: str, keys: Mapping[str, str], storage: Storage | None = None) -> Account:
    """A node's plane: a user per role, and perhaps `operator`. Raises ValueError for a name that is
    neither. `storage`: where the server has others' streams too.
    """
    users = tuple(
        User(name, key, EVERYTHING if name == OPERATOR else node_role(node, name)) for name, key in sorted(keys.items(), key=_order)
    )
    return Account(f"NODE_{node.upper()}", users, ROLE_LIMITS, storage)


def guest_account(account: Account, user: User) -> str:
    """Name of the account of a user who is no operator. Names of nodes have no underscore, so that
    it is nobody else's.
    """
    return f"{account.name}_{user.name.upper()}"


def upstream_account(node: str) -> str:
    """Name of a site's account in which `node` reaches the hub. It has no streams."""
    return f"HUB_{node.upper()}"


def render_accounts(
    accounts: Sequence[Account], *, watch_key: str = "", domain: str = "", upstream: Upstream | None = None
) -> list[str]:
    """The lines of the `accounts` block, and of a variable that says it is there.

    Args:
        accounts: Streams with their users.
        watch_key: Public key of the user that hears what JetStream says of requests in all of
            `accounts`; empty: none.
        domain: The server's JetStream domain, where sites connect as leaves; empty: none.
        upstream: The hub, if this is a site's server.
    """
    lines = ["accounts {"]
    for account in accounts:
        lines += _with_streams(account, watched=bool(watch_key))
        for user in account.guests:
            lines += _guest(account, user, domain)
    for node in upstream.nodes if upstream is not None else ():
        lines += _way_to_the_hub(node, upstream.domain if upstream is not None else "")
    if watch_key:
        lines += _watcher(accounts, watch_key)
    # The main file reads it: without these lines, or with a part of them, the server does not
    # start, or goes on with what it had.
    return [*lines, "}", f"{MAX_CONNECTIONS_VARIABLE}: {MAX_CONNECTIONS}"]


def local_name(subject: str) -> str:
    """What an account calls a subject that it imports."""
    if subject.startswith(_API) and not subject.startswith(_ANSWERED_BY_STREAMS):
        return subject.removeprefix("$JS.")
    return subject


def _with_streams(account: Account, *, watched: bool) -> list[str]:
    """The account that owns the streams. What a guest may publish is exported to it as a service
    and to nobody else: an import is the only way from one account into another, so nothing else of
    this one can be reached.
    """
    services = dict[str, list[str]]()
    for user in account.guests:
        for subject in user.permissions.publish:
            services.setdefault(subject, []).append(guest_account(account, user))
    return [
        f"  {account.name} {{",
        f"    jetstream: {'enabled' if account.storage is None else account.storage.render()}",
        *_users(account.operators),
        "    exports: [",
        *(_export("service", subject, names) for subject, names in services.items()),
        *([_export("stream", ADVISORY, [WATCH_ACCOUNT])] if watched else []),
        "    ]",
        "  }",
    ]


def _export(kind: str, subject: str, names: Sequence[str]) -> str:
    many = ", response: stream" if subject.startswith(_ANSWERED_BY_STREAMS) else ""
    return f"      {{ {kind}: {quoted(subject)}{many}, accounts: [{', '.join(map(quoted, names))}] }}"


def _guest(account: Account, user: User, domain: str) -> list[str]:
    wanted, heard = user.permissions.publish, dict[str, list[str]]()
    for listener in account.guests:
        for subject in _heard_by(listener, user):
            heard.setdefault(subject, []).append(guest_account(account, listener))
    renamed = {subject: local_name(subject) for subject in wanted if local_name(subject) != subject}
    # The server applies permissions to what a mapping has made of a subject, but a leaf's server,
    # told of them, to what was said.
    said_by_leaves = [said for subject in wanted for said in _behind_a_domain(subject, domain)] if domain else []
    publish = dict.fromkeys((*(local_name(subject) for subject in wanted), *said_by_leaves))
    permissions = Permissions(tuple(publish), user.permissions.subscribe)
    return [
        f"  {guest_account(account, user)} {{",
        _limits(user.limits or account.limits),
        *_users([User(user.name, user.public_key, permissions)]),
        "    imports: [",
        *(_import("service", account.name, subject, _renaming(subject)) for subject in wanted),
        *(
            _import("stream", guest_account(account, writer), subject)
            for writer in account.guests
            for subject in _heard_by(user, writer)
        ),
        "    ]",
        "    exports: [",
        *(_export("stream", subject, names) for subject, names in heard.items()),
        "    ]",
        "    mappings {",
        *(f"      {quoted(said)}: {quoted(meant)}" for subject, meant in renamed.items() for said in _sayings(subject, domain)),
        "    }",
        "  }",
    ]


def _import(kind: str, account: str, subject: str, further: str = "") -> str:
    return f"      {{ {kind}: {{ account: {quoted(account)}, subject: {quoted(subject)} }}{further} }}"


def _renaming(subject: str) -> str:
    name = local_name(subject)
    return "" if name == subject else f", to: {quoted(name)}"


def _sayings(subject: str, domain: str) -> Iterator[str]:
    yield subject
    if domain:
        yield from _behind_a_domain(subject, domain)


def _way_to_the_hub(node: UpstreamNode, domain: str) -> list[str]:
    """The hub decides by its own account of this node; what is said here only stops mistakes
    early.
    """
    allowed = swarm_node(node.name)
    subjects = tuple(said for subject in allowed.publish for said in _behind_a_domain(subject, domain))
    return [
        f"  {upstream_account(node.name)} {{",
        *_users([User(node.name, node.public_key, Permissions(subjects, allowed.subscribe))]),
        "  }",
    ]


def _behind_a_domain(subject: str, domain: str) -> Iterator[str]:
    """What a client says that means another domain's JetStream: requests and keys go by way of its
    API.
    """
    if subject.startswith(_API):
        yield f"$JS.{domain}.API.{subject.removeprefix(_API)}"
    elif subject.startswith("$KV."):
        yield f"$JS.{domain}.API.{subject}"
    else:
        yield subject


def _watcher(accounts: Sequence[Account], key: str) -> list[str]:
    return [
        f"  {WATCH_ACCOUNT} {{",
        _limits(ROLE_LIMITS),
        *_users([User(WATCH, key, Permissions((), (f"*.{ADVISORY}",)))]),
        "    imports: [",
        *(_import("stream", account.name, ADVISORY, f", prefix: {quoted(account.name)}") for account in accounts),
        "    ]",
        "  }",
    ]


def _heard_by(listener: User, writer: User) -> list[str]:
    """What `listener` hears of what `writer` publishes, besides replies to itself."""
    return [subject for subject in listener.permissions.subscribe if subject in writer.permissions.publish]


def _limits(limits: Limits) -> str:
    named = {"max_connections": limits.connections, "max_subscriptions": limits.subscriptions, "max_leafnodes": limits.leaves}
    named["max_payload"] = limits.payload
    return f"    limits {{ {', '.join(f'{name}: {value}' for name, value in named.items())} }}"


def _users(users: Sequence[User]) -> list[str]:
    lines = ["    users: ["]
    for user in users:
        lines += [
            f"      {{ # {user.name}",
            f"        nkey: {user.public_key}",
            "        permissions {",
            *_allowed("publish", user.permissions.publish),
            *_allowed("subscribe", user.permissions.subscribe),
            "        }",
            "      }",
        ]
    return [*lines, "    ]"]


def _allowed(verb: str, subjects: Sequence[str]) -> list[str]:
    if not subjects:
        return [f'          {verb}: {{ deny: ">" }}']
    return [f"          {verb}: {{ allow: [", *(f"            {quoted(subject)}" for subject in subjects), "          ] }"]


def _order(item: tuple[str, str]) -> int:
    return ROLES.index(item[0]) if item[0] in ROLES else len(ROLES)


def quoted(text: str) -> str:
    """A string of the configuration's syntax."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

"""The configuration file of a secured NATS server: its accounts, users and permissions, rendered
from users' public keys and `shared.identity.permissions`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shared.identity.permissions import (
    ADVISORY,
    EVERYTHING,
    SWARM_ACCOUNT,
    Permissions,
    node_account_name,
    node_role,
    swarm_node,
    swarm_observer,
    user_account,
)
from shared.roles import OBSERVER, OPERATOR, ROLES, WATCH
from swarm_cli.errors import CommandError

HOSTED_GIB = 64
"""For a node on a shared server: its streams reserve 5.3 GiB, which is 16 GiB in three copies. The
rest is for policies, which reserve nothing; four are kept: 4 GiB of weights in three copies.
"""
MOST_STREAMS = 64
"""A node has about a dozen, including those for chunks and the bucket."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Limits on what an account may store. The server counts every copy of a stream, and space that
    a stream reserves even if it is unused.
    """

    gib: int
    streams: int = MOST_STREAMS

    def render(self) -> str:
        """The value of `jetstream` in an account. No memory is allowed, because no stream
        uses it.
        """
        return f"{{ max_file: {self.gib}GB, max_mem: 0, max_streams: {self.streams} }}"


MAX_CONNECTIONS_VARIABLE = "swarm_max_connections"
"""A variable that is defined only together with the accounts, for a server setting that a reload
may change. Its value is the server's default.
"""
MAX_CONNECTIONS = 65536
WATCH_ACCOUNT = "WATCH"
MAX_PAYLOAD = 8 * 2**20
"""The same limit as on our servers, even if a server accepts more: a message that one server
accepts and the next refuses would be lost between them.
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
"""One for each reply with many parts: at most about 80 at once per verifier, so 640 for 8 verifiers
behind one leaf.
"""
MEMBER_LEAVES = 4
"""A site's cluster of three servers, and one that has been replaced."""
OBSERVER_LIMITS = Limits(connections=16, subscriptions=1024, payload=64 * 1024)
"""For all spectators together: they share one key. They send only requests."""
ROLE_LIMITS = Limits(connections=256, subscriptions=1024)
"""For a role on its node's plane: it is trusted, and may have many generators. The limit stops a
faulty program that opens connections without end.
"""

_API = "$JS.API."
ANSWERED_BY_STREAMS = ("$JS.API.DIRECT.GET.", "$JS.API.CONSUMER.MSG.NEXT.")
"""Requests answered by the stream or consumer instead of the server: they need no other name, and
one request may have many answers.
"""


@dataclass(frozen=True, slots=True)
class User:
    """One user: a name for human readers, its public nkey, and its permissions."""

    name: str
    public_key: str
    permissions: Permissions
    limits: Limits | None = None
    """None: the limits of all guests of its account."""


@dataclass(frozen=True, slots=True)
class Account:
    """Streams and their users. Operators are in the account itself; every other user gets a
    separate account (`guest_account`).
    """

    name: str
    users: tuple[User, ...]
    limits: Limits
    """For each guest."""
    storage: Storage | None = None
    """For all its streams together; None: as much as the server has."""

    @property
    def operators(self) -> tuple[User, ...]:
        """Users with all rights, in the account itself."""
        return tuple(user for user in self.users if user.permissions == EVERYTHING)

    @property
    def guests(self) -> tuple[User, ...]:
        """Users with limited rights, each in a separate account."""
        return tuple(user for user in self.users if user.permissions != EVERYTHING)


@dataclass(frozen=True, slots=True)
class UpstreamNode:
    """A site's node that connects to the hub, and the public half of its swarm key."""

    name: str
    public_key: str

    @property
    def seed_variable(self) -> str:
        """Environment variable from which the server reads the seed: it cannot read one from a
        file, and a configuration should hold no secrets.
        """
        return f"SWARM_KEY_{self.name.upper().replace('-', '_')}"


@dataclass(frozen=True, slots=True)
class Upstream:
    """The hub of a site's server. Each node connects with its own key, so that at the hub the site
    is limited to that node's account.
    """

    url: str
    domain: str
    ca_file: str
    nodes: tuple[UpstreamNode, ...]
    credentials: str = ""
    """Path of each node's .creds file, with {node} in it, for a hub whose accounts are claims; else
    the seed comes from the environment.
    """


def swarm_account(keys: Mapping[str, str], connections: int = MEMBER_CONNECTIONS, observer_key: str = "") -> Account:
    """The swarm plane's account: a user per node, and perhaps `operator`. `keys`: public keys by
    name; `connections`: how many a node may have, none if it is shut out; `observer_key`: the key
    that all spectators share, empty for none.
    """
    users = [User(name, key, EVERYTHING if name == OPERATOR else swarm_node(name)) for name, key in keys.items()]
    if observer_key:
        users.append(User(OBSERVER, observer_key, swarm_observer(), OBSERVER_LIMITS))
    return Account(SWARM_ACCOUNT, tuple(users), Limits(connections, MEMBER_SUBSCRIPTIONS, MEMBER_LEAVES if connections else 0))


def node_account(node: str, keys: Mapping[str, str], storage: Storage | None = None) -> Account:
    """The account of a node's plane: a user per role, and perhaps `operator`. Raises ValueError for
    a name that is neither. `storage`: the limit if the server is shared with other nodes.
    """
    users = tuple(
        User(name, key, EVERYTHING if name == OPERATOR else node_role(node, name)) for name, key in sorted(keys.items(), key=_order)
    )
    return Account(node_account_name(node), users, ROLE_LIMITS, storage)


def guest_account(account: Account, user: User) -> str:
    """Name of the account of a user who is not an operator."""
    return user_account(account.name, user.name)


def upstream_account(node: str) -> str:
    """Name of the account on a site's server through which `node` reaches the hub. It has no
    streams.
    """
    return f"HUB_{node.upper()}"


def render_accounts(
    accounts: Sequence[Account], *, watch_key: str = "", domain: str = "", upstream: Upstream | None = None
) -> list[str]:
    """The lines of the `accounts` block, and of a variable that proves that the block was read.

    Args:
        accounts: Streams with their users.
        watch_key: Public key of the user that receives JetStream's advisories about requests in all
            `accounts`; empty: none.
        domain: The server's JetStream domain, if sites connect as leaves; empty: none.
        upstream: The hub, if this is a site's server.

    Raises:
        CommandError: two users have the same key: a server with such a file refuses every reload
            and does not start.
    """
    refuse_shared_keys(accounts, watch_key)
    lines = [
        "# After a change of nodes, write it again, then run twice, seconds apart,",
        "#   nats-server --signal reload=PID      (each server's process id, or the file that it wrote with -P)",
        "# because nats-server 2.15.1 gives a new account its imports only at the second reload.",
        "accounts {",
    ]
    for account in accounts:
        lines += _with_streams(account, watched=bool(watch_key))
        for guest in guests_of(account, domain):
            lines += _guest(account, guest)
    for node in upstream.nodes if upstream is not None else ():
        lines += _way_to_the_hub(node, upstream.domain if upstream is not None else "")
    if watch_key:
        lines += _watcher(accounts, watch_key)
    # The main file uses the variable: if these lines are missing or incomplete, the server does not
    # start, or keeps its earlier configuration.
    return [*lines, "}", f"{MAX_CONNECTIONS_VARIABLE}: {MAX_CONNECTIONS}"]


def refuse_shared_keys(accounts: Sequence[Account], watch_key: str) -> None:
    """Raises CommandError if two users have the same key."""
    holders = {watch_key: WATCH} if watch_key else {}
    for name, public_key in ((f"{user.name} of {account.name}", user.public_key) for account in accounts for user in account.users):
        if public_key and public_key in holders:
            raise CommandError(
                f"{holders[public_key]} and {name} have the same public key, {public_key}, and a server that reads this neither "
                "reloads nor starts: a newcomer's line must have a key of its own; nothing was written"
            )
        holders[public_key] = name


def local_name(subject: str) -> str:
    """The name of an imported subject inside the importing account."""
    if subject.startswith(_API) and not subject.startswith(ANSWERED_BY_STREAMS):
        return subject.removeprefix("$JS.")
    return subject


def _with_streams(account: Account, *, watched: bool) -> list[str]:
    """The account that owns the streams. Each subject that a guest may publish is exported as a
    service to that guest only. An import is the only way from one account into another, so guests
    can reach nothing else here.
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
    many = ", response: stream" if subject.startswith(ANSWERED_BY_STREAMS) else ""
    return f"      {{ {kind}: {quoted(subject)}{many}, accounts: [{', '.join(map(quoted, names))}] }}"


@dataclass(frozen=True, slots=True)
class _Hearing:
    """Which guests of an account publish and receive a subject, besides replies to themselves."""

    writers: Mapping[str, Sequence[User]]
    listeners: Mapping[str, Sequence[User]]

    @classmethod
    def of(cls, account: Account) -> _Hearing:
        writers, listeners = dict[str, list[User]](), dict[str, list[User]]()
        for user in account.guests:
            for subject in user.permissions.publish:
                writers.setdefault(subject, []).append(user)
            for subject in user.permissions.subscribe:
                listeners.setdefault(subject, []).append(user)
        return cls(writers, listeners)


@dataclass(frozen=True, slots=True)
class Guest:
    """A user's own account: what it imports and exports, in whichever form it is written."""

    name: str
    user: User
    """With the permissions that it has inside this account."""
    limits: Limits
    services: Sequence[str]
    """Subjects imported from the streams' account, under their `local_name`."""
    heard_of: Sequence[tuple[str, str]]
    """Subjects that it receives, each with the account of who publishes it."""
    hearers: Mapping[str, Sequence[str]]
    """Accounts that receive what it publishes, by subject."""
    mappings: Mapping[str, str]


def guests_of(account: Account, domain: str) -> Iterator[Guest]:
    """The accounts of all users of `account` but its operators. `domain`: the server's, if sites
    connect as leaves.
    """
    hearing = _Hearing.of(account)
    for user in account.guests:
        wanted = user.permissions.publish
        # The server checks permissions after a mapping has changed the subject. A leaf's server,
        # which learns the permissions from this one, checks them against the original subject.
        said_by_leaves = [said for subject in wanted for said in _behind_a_domain(subject, domain)] if domain else []
        publish = dict.fromkeys((*(local_name(subject) for subject in wanted), *said_by_leaves))
        renamed = {subject: local_name(subject) for subject in wanted if local_name(subject) != subject}
        yield Guest(
            name=guest_account(account, user),
            user=replace(user, permissions=Permissions(tuple(publish), user.permissions.subscribe)),
            limits=user.limits or account.limits,
            services=wanted,
            heard_of=[
                (subject, guest_account(account, writer))
                for subject in user.permissions.subscribe
                for writer in hearing.writers.get(subject, ())
            ],
            hearers={
                subject: [guest_account(account, listener) for listener in hearing.listeners[subject]]
                for subject in wanted
                if subject in hearing.listeners
            },
            mappings={said: meant for subject, meant in renamed.items() for said in _sayings(subject, domain)},
        )


def _guest(account: Account, guest: Guest) -> list[str]:
    """The text of a guest's account."""
    return [
        f"  {guest.name} {{",
        _limits(guest.limits),
        *_users([guest.user]),
        "    imports: [",
        *(_import("service", account.name, subject, _renaming(subject)) for subject in guest.services),
        *(_import("stream", writer, subject) for subject, writer in guest.heard_of),
        "    ]",
        "    exports: [",
        *(_export("stream", subject, names) for subject, names in guest.hearers.items()),
        "    ]",
        "    mappings {",
        *(f"      {quoted(said)}: {quoted(meant)}" for said, meant in guest.mappings.items()),
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
    """The account through which a node reaches the hub. The hub enforces its own permissions; those
    here only catch mistakes early.
    """
    allowed = swarm_node(node.name)
    subjects = tuple(said for subject in allowed.publish for said in _behind_a_domain(subject, domain))
    return [
        f"  {upstream_account(node.name)} {{",
        *_users([User(node.name, node.public_key, Permissions(subjects, allowed.subscribe))]),
        "  }",
    ]


def _behind_a_domain(subject: str, domain: str) -> Iterator[str]:
    """The subjects that a client uses for another domain's JetStream: requests and keys go through
    that domain's API.
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
    """`text` as a string in the configuration's syntax."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files on the server."""

    cert_file: str
    key_file: str


def render(
    accounts: Sequence[str],
    *,
    tls: Tls | None,
    host: str,
    port: int,
    store_dir: str,
    sync_interval: str,
    domain: str = "",
    leaf_port: int = 0,
    upstream: Upstream | None = None,
) -> str:
    """The file's text. Without `tls` use it only on loopback: keys are never sent, but everything
    else could be read and changed on the network path.

    Args:
        accounts: Lines of the accounts, from `render_accounts` or `render_claims`.
        tls: The server's certificate, for clients and leaves.
        host: Address to listen on.
        port: Port for clients.
        store_dir: Folder of the streams. nats-server's own default is the temporary folder, which a
            restart of the machine empties.
        sync_interval: When messages are forced to the disk.
        domain: JetStream domain, which a hub and a site need; empty: none.
        leaf_port: Port on which sites connect as leaves; 0: none.
        upstream: The hub, if this is a site's server.
    """
    lines = [
        "# Written by `swarm nats config`.",
        f"host: {quoted(host)}",
        f"port: {port}",
        "max_payload: 8MB",
        "max_pending: 96MB",
        *_jetstream(store_dir, sync_interval, domain),
        "# nats-py 2.16 cannot read the second format of acknowledgements.",
        "feature_flags { js_ack_fc_v2: false }",
        *_tls(tls),
        *_leaves(tls, host, leaf_port, upstream),
        *accounts,
        f"max_connections: ${MAX_CONNECTIONS_VARIABLE}",
    ]
    return "\n".join(lines) + "\n"


def render_accounts_only(
    accounts: Sequence[Account], *, watch_key: str = "", domain: str = "", upstream: Upstream | None = None
) -> str:
    """Only the accounts, and a site's connections to its hub, to be included by a file with the
    other settings, such as the one in `k8s/base/nats`. That file must contain
    `max_connections: $swarm_max_connections` after the include, because a server without these
    accounts would admit anybody.
    """
    lines = [
        "# Written by `swarm nats config --accounts-only`.",
        *_leaves(None, "", 0, upstream),
        *render_accounts(accounts, watch_key=watch_key, domain=domain, upstream=upstream),
    ]
    return "\n".join(lines) + "\n"


def _jetstream(store_dir: str, sync_interval: str, domain: str) -> list[str]:
    named = [f"  domain: {quoted(domain)}"] if domain else []
    return [
        "jetstream {",
        f"  store_dir: {quoted(store_dir)}",
        *named,
        "  max_file_store: 1TB",
        f"  sync_interval: {sync_interval}",
        "}",
    ]


def _tls(tls: Tls | None) -> list[str]:
    if tls is None:
        return []
    return ["tls {", f"  cert_file: {quoted(tls.cert_file)}", f"  key_file: {quoted(tls.key_file)}", "  timeout: 5", "}"]


def _leaves(tls: Tls | None, host: str, leaf_port: int, upstream: Upstream | None) -> list[str]:
    lines = [f"  host: {quoted(host)}", f"  port: {leaf_port}", *(f"  {line}" for line in _tls(tls))] if leaf_port else []
    if upstream is not None:
        authority = f", tls {{ ca_file: {quoted(upstream.ca_file)} }}" if upstream.ca_file else ""
        lines += ['  reconnect: "2s"', "  remotes: ["]
        for node in upstream.nodes:
            account = quoted(upstream_account(node.name))
            if upstream.credentials:
                file = quoted(upstream.credentials.replace("{node}", node.name))
                lines.append(f"    {{ url: {quoted(upstream.url)}, credentials: {file}, account: {account}{authority} }}")
                continue
            lines += [
                f"    # {node.seed_variable}: the seed in keys/{node.name}/swarm.nk, in the server's environment.",
                f"    {{ url: {quoted(upstream.url)}, nkey: ${node.seed_variable}, account: {account}{authority} }}",
            ]
        lines.append("  ]")
    return ["leafnodes {", *lines, "}"] if lines else []

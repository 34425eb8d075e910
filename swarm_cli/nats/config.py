"""The configuration file of a secured NATS server, rendered from users' public keys and
`shared.identity.permissions`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_cli.nats.accounts import MAX_CONNECTIONS_VARIABLE, Account, Upstream, quoted, render_accounts, upstream_account


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files on the server."""

    cert_file: str
    key_file: str


def render(
    accounts: Sequence[Account],
    *,
    tls: Tls | None,
    host: str,
    port: int,
    store_dir: str,
    sync_interval: str,
    watch_key: str = "",
    domain: str = "",
    leaf_port: int = 0,
    upstream: Upstream | None = None,
) -> str:
    """The file's text. Without `tls` use it only on loopback: keys are never sent, but everything
    else could be read and changed on the network path.

    Args:
        accounts: Streams with their users.
        tls: The server's certificate, for clients and leaves.
        host: Address to listen on.
        port: Port for clients.
        store_dir: Folder of the streams. nats-server's own default is the temporary folder, which a
            restart of the machine empties.
        sync_interval: When messages are forced to the disk.
        watch_key: Public key of the user of `swarm nats watch`; empty: none.
        domain: JetStream domain, which a hub and a site need; empty: none.
        leaf_port: Port on which sites connect as leaves; 0: none.
        upstream: The hub, if this is a site's server.
    """
    lines = [
        "# Written by `swarm nats config`. After a change of nodes, write it again, then run twice, seconds apart,",
        "#   nats-server --signal reload=PID      (the server's process id, or the file that it wrote with -P)",
        "# because nats-server 2.15.1 gives a new account its imports only at the second reload.",
        f"host: {quoted(host)}",
        f"port: {port}",
        "max_payload: 8MB",
        "max_pending: 96MB",
        *_jetstream(store_dir, sync_interval, domain),
        "# nats-py 2.16 cannot read the second format of acknowledgements.",
        "feature_flags { js_ack_fc_v2: false }",
        *_tls(tls),
        *_leaves(tls, host, leaf_port, upstream),
        *render_accounts(accounts, watch_key=watch_key, domain=domain, upstream=upstream),
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
        "# Written by `swarm nats config --accounts-only`. After a change of nodes, write it again, then run twice, seconds apart,",
        "#   nats-server --signal reload=PID      (each server's process id, or its pid_file)",
        "# because nats-server 2.15.1 gives a new account its imports only at the second reload.",
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
            lines += [
                f"    # {node.seed_variable}: the seed in keys/{node.name}/swarm.nk, in the server's environment.",
                f"    {{ url: {quoted(upstream.url)}, nkey: ${node.seed_variable}, account: {account}{authority} }}",
            ]
        lines.append("  ]")
    return ["leafnodes {", *lines, "}"] if lines else []

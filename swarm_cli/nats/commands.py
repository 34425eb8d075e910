"""`swarm nats keys`, `config` and `init`: set up a secured server and its streams. The other
commands of `swarm nats` are only registered here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from shared.config.verifier_section import ViewConfig
from shared.contracts.limits import SWARM_LIMITS
from shared.contracts.streams import (
    ensure_directory,
    ensure_node_bucket,
    ensure_node_streams,
    node_streams,
    swarm_streams,
    verifier_consumer,
)
from shared.contracts.subjects import node_rollouts_stream
from shared.identity.permissions import SWARM_ACCOUNT, user_account
from shared.policy_store.jetstream import policies_stream, prepare_policies_stream
from shared.roles import OPERATOR, WATCH
from shared.runtime.exits import EXIT_CONFIG
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.transport.base import Lowering, StreamSpec, Transport, WouldLower
from shared.transport.blobs import companion
from shared.transport.nats.claims import credentials_text
from swarm_cli.chosen_config import LOOPBACK, ConfigOption, NodeUrlOption, SwarmUrlOption, load_chosen
from swarm_cli.console import count, note
from swarm_cli.errors import CommandError
from swarm_cli.nats.account_list import (
    NODE_KEYS,
    OPERATOR_KEYS,
    Form,
    Plane,
    accounts_for,
    checked_domain,
    key_file,
    key_if_there,
    listed_nodes,
    make_missing_keys,
    named_node,
    public_key_of,
)
from swarm_cli.nats.backup import backup, restore, with_key
from swarm_cli.nats.claims import CLAIMS_KEY, account_claims, push_now, render_claims, signing_key
from swarm_cli.nats.forget import forget
from swarm_cli.nats.report import report
from swarm_cli.nats.server_config import (
    HOSTED_GIB,
    MEMBER_CONNECTIONS,
    Storage,
    Tls,
    Upstream,
    UpstreamNode,
    render,
    render_accounts,
    render_accounts_only,
)
from swarm_cli.nats.watch import watch_requests
from swarm_cli.replace_file import replace_file
from swarm_cli.target import default_target, refuse_unnamed_server

nats_app = typer.Typer(
    name="nats",
    help="Keys, configuration and streams of a NATS server: set up, report, back up, restore, forget a node.",
    no_args_is_help=True,
)

nats_app.command("watch")(watch_requests)
nats_app.command("report")(report)
nats_app.command("backup")(backup)
nats_app.command("restore")(restore)
nats_app.command("forget")(forget)

CONNECT_TIMEOUT_S = 10.0


FolderOption = Annotated[Path, typer.Option(help="Folder of key files: FOLDER/NODE/ROLE.nk, operator.nk, swarm.nk.")]


@nats_app.command("keys")
def make_keys(
    nodes: Annotated[
        list[str], typer.Argument(metavar="NODE", help="Names of nodes, or `operator` for the swarm plane's operator.")
    ],
    folder: FolderOption = Path("keys"),
) -> None:
    """Create the missing key files and print the public keys. A server's operator needs only the
    public keys.
    """
    for node in nodes:
        for name, public_key in make_missing_keys(folder, node, OPERATOR_KEYS if node == OPERATOR else NODE_KEYS).items():
            typer.echo(f"{node} {name} {public_key} {key_file(folder, node, name)}")


@nats_app.command("config")
def print_config(
    nodes: Annotated[
        list[str],
        typer.Option("--nodes", help="NAME, with keys in --folder, or NAME=U... if only the node's public key is known."),
    ],
    plane: Annotated[Plane, typer.Option(help="The server's plane; both: two planes in accounts isolated from each other.")],
    folder: FolderOption = Path("keys"),
    tls_cert: Annotated[str, typer.Option(help="Path of the certificate chain (PEM) on the server.")] = "",
    tls_key: Annotated[str, typer.Option(help="Path of its private key (PEM).")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65_535, help="Port for clients. Two servers on one machine need different ports.")
    ] = 4222,
    store_dir: Annotated[
        str,
        typer.Option(
            help="Folder for the server's streams, one per server; a relative path starts at the server's working folder. "
            "Omit -sd on the server's command line.  [default: nats-PLANE]"
        ),
    ] = "",
    sync_interval: Annotated[
        str, typer.Option(help="always: acknowledged means on disk. 10s: faster, but a power cut loses up to 10 s.")
    ] = "always",
    domain: Annotated[str, typer.Option(help="The server's JetStream domain, for a hub with sites as leaves, or for a site.")] = "",
    leaf_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="For a hub: port for sites that connect as leaves; 0: none.")
    ] = 0,
    hub_url: Annotated[str, typer.Option(help="For a site's server: the hub's leaf port, tls://HOST:7422.")] = "",
    hub_domain: Annotated[str, typer.Option(help="The hub's JetStream domain; the nodes' nats.swarm_domain.")] = "hub",
    hub_ca: Annotated[
        str, typer.Option(help="PEM file of the authority that signed the hub's certificate; empty: the system's authorities.")
    ] = "",
    node_connections: Annotated[
        int,
        typer.Option(
            min=0,
            help="Connections that one node may have on the swarm plane: two per verifier plus two. Each can fill 96 MB of the "
            "server's memory with unread replies. 0, with --push: shut the nodes out.",
        ),
    ] = MEMBER_CONNECTIONS,
    node_storage_gib: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="GiB that each node's streams may take, counting all copies; 0: as much as the server has.  "
            "A single server does not start unless it has that much for every node.  "
            f"[default: {HOSTED_GIB} with --plane both and --domain, a cluster that others reach; else 0]",
        ),
    ] = None,
    accounts_only: Annotated[
        bool, typer.Option("--accounts-only", help="Print only accounts, users and permissions, for a file that includes them.")
    ] = False,
    form: Annotated[
        Form,
        typer.Option(
            "--accounts",
            help="text: in the configuration, for up to about 300 nodes. claims: in the servers' own resolver, for a hub "
            "with more; with --hub-url, that the hub's are.",
        ),
    ] = Form.TEXT,
    push: Annotated[
        str, typer.Option(help="Give the claims of --nodes to this running hub, tls://HOST:4222, trusted by --hub-ca. No reload.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="File to write atomically; unchanged if anything fails.  [default: print it]")
    ] = None,
) -> None:
    """Write a server's configuration: TLS, an account and a user per node and role, and
    permissions.

    Use --out rather than the shell's `>`, which leaves an empty file when the command fails: a
    server started from an empty file admits everybody.
    """
    chosen = listed_nodes(nodes)
    _check_form(form, plane, push, hub_url, node_connections, accounts_only=accounts_only)
    _check_interval(sync_interval)
    checked_domain(domain)
    watch_key = key_if_there(folder / OPERATOR / f"{WATCH}.nk")
    storage = _storage(plane, node_storage_gib, domain)
    names = [named_node(entry)[0] for entry in chosen]
    upstream = _upstream(hub_url, hub_domain, hub_ca, names, folder, form) if hub_url else None
    if accounts_only:
        if leaf_port:
            raise CommandError(
                "--accounts-only prints no leaf port: omit --leaf-port and put the port into the file that includes the accounts"
            )
        _check_leaves(plane, domain, leaf_port, hub_url)
        if store_dir:
            raise CommandError(
                "--accounts-only prints no store folder: omit --store-dir and set it in the file that includes the accounts"
            )
        accounts = accounts_for(plane, dict(named_node(entry) for entry in chosen), folder, node_connections, storage)
        _deliver(render_accounts_only(accounts, watch_key=watch_key, domain=domain, upstream=upstream), out)
        return
    if push:
        _push(dict(named_node(entry) for entry in chosen), folder, node_connections, watch_key, domain, push, hub_ca)
        return
    if bool(tls_cert) != bool(tls_key):
        raise CommandError("--tls-cert and --tls-key belong together: give both or neither")
    if not tls_cert and host not in LOOPBACK:
        raise CommandError(
            f"without TLS anyone on the network path can read and change messages: {host} needs --tls-cert and --tls-key"
        )
    _check_leaves(plane, domain, leaf_port, hub_url)
    accounts = accounts_for(plane, dict(named_node(entry) for entry in chosen), folder, node_connections, storage)
    tls = Tls(tls_cert, tls_key) if tls_cert else None
    domain, store_dir = domain or ("site" if hub_url else ""), store_dir or f"nats-{plane.value}"
    if form is Form.CLAIMS and not hub_url:
        key = signing_key(folder)
        lines = render_claims(account_claims(accounts, key, watch_key=watch_key, domain=domain), key, f"{store_dir}-accounts")
    else:
        lines = render_accounts(accounts, watch_key=watch_key, domain=domain, upstream=upstream)
    text = render(
        lines,
        tls=tls,
        host=host,
        port=port,
        store_dir=store_dir,
        sync_interval=sync_interval,
        domain=domain,
        leaf_port=leaf_port,
        upstream=upstream,
    )
    _deliver(text, out)


@nats_app.command()
def init(
    plane: Annotated[Plane, typer.Option(help="The plane whose streams to create.")],
    key: Annotated[Path | None, typer.Option(help="Operator's key file.  [default: nats.node_key_file as operator, none]")] = None,
    lower: Annotated[
        bool,
        typer.Option(
            "--lower",
            help="Also lower limits of existing streams: fewer replicas, less space, a shorter age. Messages beyond a lowered "
            "limit are deleted at once.",
        ),
    ] = False,
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Create streams, buckets and the verifier's consumer, for services without permission to do so
    (nats.create_streams = false).

    Existing streams get this version's settings and the configured number of replicas and window
    (nats.replicas, nats.window_gib), and keep their messages. If that would lower replicas or a
    limit, the command refuses and names the differences.
    """
    chosen = load_chosen(config, ViewConfig)
    refuse_unnamed_server(chosen, node_url, swarm_url)
    node_config = _on_servers(chosen, node_url, swarm_url)
    if plane in (Plane.SWARM, Plane.BOTH) and node_config.nats.swarm_url is None:
        raise CommandError("nats.swarm_url is none, so this node has no swarm plane: set nats.swarm_url, or use --plane node")
    try:
        asyncio.run(_init(node_config, plane, key, Lowering.APPLY if lower else Lowering.REFUSE))
    except WouldLower as error:  # somebody else raised a limit after the check
        raise _refusal(str(error)) from None


async def _init(config: ViewConfig, plane: Plane, key: Path | None, lowering: Lowering) -> None:
    """All streams of both planes are looked at before the first is changed, so that a refused
    command changes nothing.
    """
    nats, node, verifier = config.nats, config.node.id, config.verifier
    at_node = at_swarm = None
    async with AsyncExitStack() as connected:
        if plane is not Plane.SWARM:
            at_node = await connect_node_plane(with_key(config, "node_key_file", key), OPERATOR, timeout_s=CONNECT_TIMEOUT_S)
            connected.push_async_callback(at_node.close)
        if plane is not Plane.NODE:
            at_swarm = await connect_swarm_plane(with_key(config, "swarm_key_file", key), OPERATOR, timeout_s=CONNECT_TIMEOUT_S)
            connected.push_async_callback(at_swarm.close)
        if lowering is Lowering.REFUSE:
            policies = policies_stream(node, replicas=nats.replicas)
            found = await lowered_node_streams(at_node, node, [policies], replicas=nats.replicas) if at_node else []
            found += (
                await lowered_swarm_streams(at_swarm, replicas=nats.replicas, window_bytes=nats.window_bytes) if at_swarm else []
            )
            if found:
                raise _refusal("; ".join(found))
        if at_node:
            await ensure_node_streams(at_node, node, replicas=nats.replicas, lowering=lowering)
            consumer = verifier_consumer(verifier.ack_wait_s)
            await at_node.ensure_consumer(node_rollouts_stream(node), consumer)
            # Made here because the trainer may not. It stays empty if policies travel by a shared
            # volume.
            await prepare_policies_stream(at_node, node, create=True, replicas=nats.replicas, lowering=lowering)
            typer.echo(f"node plane of {node}: all streams exist")
        if at_swarm:
            await update_swarm_streams(at_swarm, replicas=nats.replicas, window_bytes=nats.window_bytes, lowering=lowering)
            typer.echo("swarm plane: all streams exist")


def _refusal(found: str) -> CommandError:
    return CommandError(
        f"{found}. To keep what exists, raise it in the configuration (num_replicas is nats.replicas); to lower it, run this again "
        "with --lower",
        EXIT_CONFIG,
    )


def _on_servers(config: ViewConfig, node_url: str, swarm_url: str) -> ViewConfig:
    """The configuration with the servers that the command line names, or those of the only run on
    this machine if neither it nor the configuration names one.
    """
    if not (node_url or swarm_url) and config.nats.model_fields_set & {"node_url", "swarm_url"}:
        return config
    target = default_target(config, node_url, swarm_url)
    urls = {"node_url": target.node_url, "swarm_url": target.swarm_url}
    return config.model_copy(update={"nats": config.nats.model_copy(update=urls)})


def _deliver(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
    else:
        replace_file(out, text)
        note(f"{out}: written; `nats-server --signal reload=PID` makes a running server load it")


def _check_leaves(plane: Plane, domain: str, leaf_port: int, hub_url: str) -> None:
    if leaf_port and not domain:
        raise CommandError("--leaf-port needs --domain: sites name the hub's streams by it (nats.swarm_domain)")
    if not hub_url:
        return
    if plane is not Plane.NODE:
        raise CommandError("--hub-url is for a site's server, which holds only node planes: use --plane node")
    if not hub_url.startswith("tls://"):
        raise CommandError(f"--hub-url {hub_url}: anyone on the network path can read and change plain text: use tls://HOST:7422")


def _storage(plane: Plane, gib: int | None, domain: str) -> Storage | None:
    chosen = gib if gib is not None else HOSTED_GIB if plane is Plane.BOTH and domain else 0
    return Storage(chosen) if chosen else None


def _upstream(url: str, domain: str, ca_file: str, nodes: list[str], folder: Path, form: Form) -> Upstream:
    known = tuple(UpstreamNode(node, public_key_of(folder / node / "swarm.nk")) for node in nodes)
    if form is Form.TEXT:
        return Upstream(url, domain, ca_file, known)
    for node in nodes:  # nats-server sends no claims with a bare key
        account = user_account(SWARM_ACCOUNT, node)
        file = folder / node / "swarm.creds"
        replace_file(file, credentials_text((folder / node / "swarm.nk").read_text().strip(), account), private=True)
    return Upstream(url, domain, ca_file, known, credentials=str(folder.absolute() / "{node}" / "swarm.creds"))


def _check_form(form: Form, plane: Plane, push: str, hub_url: str, node_connections: int, *, accounts_only: bool) -> None:
    if push and (form is Form.TEXT or plane is not Plane.SWARM):
        raise CommandError("--push brings claims to a swarm's hub: give --plane swarm --accounts claims with it")
    if form is Form.CLAIMS and accounts_only:
        raise CommandError("--accounts-only prints accounts as text: leave out --accounts claims, or --accounts-only")
    if form is Form.CLAIMS and plane is Plane.NODE and not hub_url:
        raise CommandError("--accounts claims is for a server with the swarm's plane: a node's own server takes text")
    if node_connections < 2 and not (push and node_connections == 0):
        raise CommandError(f"--node-connections {node_connections}: a node needs 2; 0, which shuts nodes out, needs --push")


def _push(
    nodes: dict[str, str | None], folder: Path, node_connections: int, watch_key: str, domain: str, url: str, ca_file: str
) -> None:
    accounts = accounts_for(Plane.SWARM, nodes, folder, node_connections)
    key = signing_key(folder)
    tokens = account_claims(accounts, key, watch_key=watch_key, domain=domain)
    servers = push_now(url, folder / OPERATOR / f"{CLAIMS_KEY}.nk", ca_file, tokens)
    what = "may connect" if node_connections else "shut out"
    note(f"{', '.join(nodes)}: {what}, on {count(servers, 'server')} of {url}; one that is away follows when it is back")


def _check_interval(text: str) -> None:
    """Raises CommandError if nats-server would not take it."""
    if not re.fullmatch(r"always|[1-9][0-9]{0,5}(ms|s|m|h)", text):
        raise CommandError(f"--sync-interval {text[:80]!r} is no interval: give always, or a number with its unit such as 10s")


async def lowered_node_streams(transport: Transport, node: str, more: Sequence[StreamSpec] = (), *, replicas: int = 1) -> list[str]:
    """The limits that `ensure_node_streams` would lower, of the node's streams and bucket and of
    the streams `more`: one sentence each. Changes nothing.
    """
    bucket = ensure_node_bucket(transport, node, replicas, Lowering.LOOK)
    return await _look(transport, [*node_streams(node, replicas=replicas), *more], bucket)


async def lowered_swarm_streams(
    transport: Transport, *, replicas: int = 1, window_bytes: int = SWARM_LIMITS.rollouts_max_bytes
) -> list[str]:
    """The limits that `update_swarm_streams` would lower, one sentence each. Changes nothing."""
    streams = swarm_streams(replicas=replicas, window_bytes=window_bytes)
    return await _look(transport, streams, ensure_directory(transport, replicas, Lowering.LOOK))


async def _look(transport: Transport, specs: Sequence[StreamSpec], bucket: Awaitable[None]) -> list[str]:
    """Collects all sentences instead of stopping at the first, so that the operator can correct the
    configuration in one go.

    Companions are checked separately, because the check of a stream stops before its companion when
    the stream itself would be lowered.
    """
    companions = [each for each in map(companion, specs) if each is not None]
    looks = [transport.ensure_stream(spec, Lowering.LOOK) for spec in (*specs, *companions)]
    found = dict.fromkeys(await asyncio.gather(*looks, bucket, return_exceptions=True))
    for error in found:
        if error is not None and not isinstance(error, WouldLower):
            raise error
    return list(dict.fromkeys(str(error) for error in found if error is not None))


async def update_swarm_streams(
    transport: Transport,
    *,
    replicas: int = 1,
    window_bytes: int = SWARM_LIMITS.rollouts_max_bytes,
    lowering: Lowering = Lowering.REFUSE,
) -> None:
    """Create the swarm's streams and bucket with the settings in `limits`, and update existing ones
    to them, except limits that `lowering` keeps higher.

    Only their operator calls this. Messages stay unless a new limit excludes them.
    """
    for spec in swarm_streams(replicas=replicas, window_bytes=window_bytes):
        await transport.ensure_stream(spec, lowering)
    await ensure_directory(transport, replicas, lowering)

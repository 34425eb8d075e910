"""`swarm nats keys`, `swarm nats config` and `swarm nats init`: a secured server, from nothing to streams."""

from __future__ import annotations

import asyncio
import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from shared import keys
from shared.config import NodeConfig
from shared.permissions import OPERATOR, ROLES
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.streams import NodeLimits, ensure_node_streams, ensure_swarm_streams, verifier_consumer
from shared.subjects import node_rollouts_stream
from swarm_cli.config_commands import ConfigOption, load_chosen
from swarm_cli.errors import CommandError
from swarm_cli.nats_config import Account, Tls, node_account, render, render_accounts, swarm_account

nats_app = typer.Typer(name="nats", help="Keys, configuration and streams of a secured NATS server.", no_args_is_help=True)

CONNECT_TIMEOUT_S = 10.0
_NODE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


class Plane(Enum):
    """Which plane a server carries."""

    NODE = "node"
    SWARM = "swarm"
    BOTH = "both"


FolderOption = Annotated[Path, typer.Option(help="Folder of key files: FOLDER/<node>/<role>.nk, operator.nk, swarm.nk.")]


@nats_app.command("keys")
def make_keys(
    nodes: Annotated[list[str], typer.Argument(help="Names of nodes, or `operator` for the swarm plane's own user.")],
    folder: FolderOption = Path("keys"),
) -> None:
    """Make the key files that are missing and print the public keys: what a server's operator has to be told, and no more."""
    for node in nodes:
        names = ["swarm"] if node == OPERATOR else [*ROLES, OPERATOR, "swarm"]
        for name in names:
            path = folder / _checked(node) / f"{name}.nk"
            try:
                typer.echo(f"{node} {name} {keys.load_or_create(path).public_key} {path}")
            except keys.KeyFileError as error:
                raise CommandError(str(error)) from None


@nats_app.command("config")
def print_config(
    nodes: Annotated[
        list[str], typer.Option("--nodes", help="NAME, with keys in --folder, or NAME=U... for a node of which only that is known.")
    ],
    plane: Annotated[Plane, typer.Option(help="What the server carries; both: planes in accounts that see nothing of each other.")],
    folder: FolderOption = Path("keys"),
    tls_cert: Annotated[str, typer.Option(help="Certificate chain, PEM, where the server finds it.")] = "",
    tls_key: Annotated[str, typer.Option(help="Its private key, PEM.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535)] = 4222,
    sync_interval: Annotated[
        str, typer.Option(help="always: acknowledged means on disk. 10s: faster; a power cut loses so much.")
    ] = "always",
    accounts_only: Annotated[
        bool, typer.Option("--accounts-only", help="Print accounts, users and permissions alone, for a file that includes them.")
    ] = False,
) -> None:
    """Print a server's configuration: TLS, a user per node and role, and permissions."""
    chosen = [part for entry in nodes for part in entry.split(",") if part]
    if accounts_only:
        typer.echo(render_accounts(accounts_for(plane, dict(_named(entry) for entry in chosen), folder)), nl=False)
        return
    if bool(tls_cert) != bool(tls_key):
        raise CommandError("--tls-cert and --tls-key belong together: give both or none")
    if not tls_cert and host not in {"127.0.0.1", "localhost", "::1"}:
        raise CommandError(f"without TLS everybody on the way can read and change messages: {host} needs --tls-cert and --tls-key")
    accounts = accounts_for(plane, dict(_named(entry) for entry in chosen), folder)
    tls = Tls(tls_cert, tls_key) if tls_cert else None
    typer.echo(render(accounts, tls=tls, host=host, port=port, sync_interval=sync_interval), nl=False)


@nats_app.command()
def init(
    plane: Annotated[Plane, typer.Option(help="Whose streams.")],
    key: Annotated[Path | None, typer.Option(help="Operator's key file.  [default: nats.node_key_file as operator, none]")] = None,
    config: ConfigOption = None,
) -> None:
    """Make streams, buckets and the verifier's consumer, for services that may not (nats.create_streams = false)."""
    node_config = load_chosen(config)
    if plane in (Plane.NODE, Plane.BOTH):
        asyncio.run(_init_node(_with_key(node_config, "node_key_file", key)))
        typer.echo(f"node plane of {node_config.node.id}: streams are there")
    if plane in (Plane.SWARM, Plane.BOTH):
        if node_config.nats.swarm_url is None:
            raise CommandError("nats.swarm_url is none: a node alone has no swarm plane")
        asyncio.run(_init_swarm(_with_key(node_config, "swarm_key_file", key)))
        typer.echo("swarm plane: streams are there")


def accounts_for(plane: Plane, nodes: dict[str, str | None], folder: Path) -> list[Account]:
    """The accounts of a server. `nodes`: a public key where only that is known, which will do for the swarm plane."""
    if OPERATOR in nodes:
        raise CommandError(f"no node may be called {OPERATOR!r}: that is the name of the user who may do everything")
    accounts: list[Account] = []
    if plane in (Plane.NODE, Plane.BOTH):
        users = (*ROLES, OPERATOR)
        accounts += [node_account(node, {name: _public_key(folder / node / f"{name}.nk") for name in users}) for node in nodes]
    if plane in (Plane.SWARM, Plane.BOTH):
        known = {node: given or _public_key(folder / node / "swarm.nk") for node, given in nodes.items()}
        accounts.append(swarm_account({**known, OPERATOR: _public_key(folder / OPERATOR / "swarm.nk")}))
    return accounts


async def _init_node(config: NodeConfig) -> None:
    transport = await connect_node_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S)
    try:
        verifier = config.verifier
        limits = NodeLimits(verifier_ack_wait_s=verifier.ack_wait_s, verifier_max_deliver=verifier.max_deliver)
        await ensure_node_streams(transport, config.node.id, limits, replicas=config.nats.replicas)
        await transport.ensure_consumer(node_rollouts_stream(config.node.id), verifier_consumer(limits))
    finally:
        await transport.close()


async def _init_swarm(config: NodeConfig) -> None:
    transport = await connect_swarm_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S)
    try:
        await ensure_swarm_streams(transport, replicas=config.nats.swarm_replicas)
    finally:
        await transport.close()


def _with_key(config: NodeConfig, field: str, key: Path | None) -> NodeConfig:
    if key is None:
        return config
    return config.model_copy(update={"nats": config.nats.model_copy(update={field: str(key)})})


def _named(entry: str) -> tuple[str, str | None]:
    name, _, public_key = entry.partition("=")
    if public_key and not re.fullmatch(r"U[A-Z2-7]{55}", public_key):
        raise CommandError(f"{public_key!r} is no public key of a user: it has 56 characters and begins with U")
    return _checked(name), public_key or None


def _checked(node: str) -> str:
    if not _NODE.fullmatch(node):
        raise CommandError(f"{node!r} is no name of a node: up to 32 lower-case letters, digits and hyphens")
    return node


def _public_key(path: Path) -> str:
    if not path.exists():
        raise CommandError(f"key file {path} does not exist: make it with `swarm nats keys {path.parent.name}`")
    try:
        return keys.load_or_create(path).public_key
    except keys.KeyFileError as error:
        raise CommandError(str(error)) from None

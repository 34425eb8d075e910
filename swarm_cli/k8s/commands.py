"""The commands `swarm k8s`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.roles import OBSERVER, OPERATOR
from shared.text import error_text
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.k8s.check import check
from swarm_cli.k8s.key_state import (
    SET_ASIDE,
    accounts_text,
    complete_certificates,
    complete_keys,
    contents,
    left_out,
    remember,
    remembered_domain,
    remembered_guests,
    remembered_nodes,
    roster_text,
    split_nodes,
)
from swarm_cli.k8s.own_overlay import overlay
from swarm_cli.k8s.secret_objects import (
    ACCOUNTS_FILE,
    ANNOTATION_BYTES,
    MOST_BYTES,
    ROSTER_FILE,
    annotation_bytes,
    as_objects,
    as_yaml,
    checked_namespace,
    checked_server_name,
    expected,
    server_names,
)
from swarm_cli.nats.account_list import checked_domain
from swarm_cli.replace_file import replace_file

k8s_app = typer.Typer(
    name="k8s", help="Write a cluster's overlay and Secrets, and check it before `kubectl apply`.", no_args_is_help=True
)
k8s_app.command()(overlay)
k8s_app.command()(check)

STANDARD = "-"
NODE_CONNECTIONS = 18
"""For 8 verifiers, the most that an autoscaler in k8s/components starts."""
RESERVED = {
    OPERATOR: "the name of the user with all rights",
    OBSERVER: "the name of the user that only looks",
    "swarm": "the name of the swarm's own Secrets",
    SET_ASIDE: "the folder for keys that were replaced",
}


@k8s_app.command()
def secrets(
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--nodes",
            help="All nodes of the overlay, separated by commas; NAME=U... for one outside the cluster. The folder "
            "of keys keeps both.  [default: those kept]",
        ),
    ] = None,
    out: Annotated[str, typer.Option(help="File to write, readable only by its owner, or - to print.")] = STANDARD,
    keys: Annotated[Path, typer.Option(help="Folder of the keys; missing ones are made.")] = Path("keys"),
    cert_manager: Annotated[
        bool,
        typer.Option("--cert-manager", help="Leave certificates to cert-manager: print neither nats-server-tls nor nats-ca."),
    ] = False,
    server_name: Annotated[
        list[str] | None, typer.Option(help="Another name or address of the servers, for their certificate; may be repeated.")
    ] = None,
    domain: Annotated[str, typer.Option(help="With nats-expose: hub, for sites with their own servers (kept in domain.txt).")] = "",
    node_connections: Annotated[
        int, typer.Option(min=2, help="Connections that one node may have on the swarm plane: two per verifier plus two.")
    ] = NODE_CONNECTIONS,
    namespace: Annotated[str, typer.Option(help="The overlay's namespace.")] = "swarm",
) -> None:
    """Print every Secret and ConfigMap that the cluster overlay's pods mount but the repository
    does not hold: keys, accounts, certificates and the roster.

    Their source is the folder of keys. You can run this again at any time: it prints the same, adds
    keys for a new node, and renews a certificate that expires within 30 days or lacks a name, with
    the same key. New keys are named on standard error. Apply the output with `kubectl apply
    --server-side --filename -`.
    """
    named, given = split_nodes(nodes) if nodes is not None else ([], {})
    if taken := sorted(RESERVED.keys() & {*named, *given}):
        raise CommandError(f"no node may be called {taken[0]!r}, {RESERVED[taken[0]]}: rename the node")
    if unlabelled := [name for name in named if name.endswith("-")]:
        raise CommandError(f"--nodes {unlabelled[0]!r}: no label of Kubernetes ends in a hyphen: rename the node")
    names = server_names(checked_namespace(namespace), [checked_server_name(name) for name in server_name or []])
    checked_domain(domain)
    with _one_at_a_time(keys):
        chosen = named or remembered_nodes(keys)
        wanted = expected(chosen, cert_manager=cert_manager)
        guests = remembered_guests(keys, chosen, given)
        accounts: dict[str, str | None] = {**dict.fromkeys(chosen), **guests}
        if made_keys := complete_keys(keys, chosen):
            note(f"new keys: {', '.join(made_keys)}")
        kept_domain = remembered_domain(keys, domain)
        made = {
            ACCOUNTS_FILE: accounts_text(keys, accounts, node_connections, kept_domain),
            ROSTER_FILE: roster_text(keys, chosen),
        }
        if not cert_manager:
            for line in complete_certificates(keys, names, datetime.now(UTC)):
                note(line)
        if others := left_out(keys, accounts):
            note(f"not among --nodes, so the servers will refuse them after the next reload: {', '.join(others)}")
        remember(keys, chosen, guests, kept_domain)
        objects = as_objects(wanted, contents(keys, [file for each in wanted for file in each.files.values()], made), namespace)
    _deliver(objects, out)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Two runs in one folder would each make keys of their own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CommandError(f"--keys {folder} cannot be used ({error_text(error)}): give a folder of this user") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _deliver(objects: Sequence[Mapping[str, Any]], out: str) -> None:
    """Write or print the objects. Refuse an object that is too large for Kubernetes, and warn of
    one that is too large for client-side apply.
    """
    for each in objects:
        size = sum(len(key) + len(value) for key, value in each["data"].items())
        if size * 3 // 4 > MOST_BYTES:
            raise CommandError(
                f"{each['kind']} {each['metadata']['name']} would have {size * 3 // 4 / 2**20:.1f} MiB, and Kubernetes allows 1: "
                "for more nodes, or longer names, give the swarm plane its own server (docs/kubernetes-start.md)"
            )
    if any(annotation_bytes(each) > ANNOTATION_BYTES for each in objects):
        note("too large for client-side apply: use `kubectl apply --server-side --filename -`")
    text = as_yaml(objects)
    if out == STANDARD:
        typer.echo(text, nl=False)
    else:
        replace_file(Path(out), text, private=True)
        note(f"{out}: written, readable only by you: it holds keys")

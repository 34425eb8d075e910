"""`swarm k8s secrets` and `swarm k8s check`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.identity.permissions import OPERATOR
from shared.identity.roster import RosterError
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.k8s.check.command import check
from swarm_cli.k8s.existing import found_files, is_installed, known_nodes, listed, lost
from swarm_cli.k8s.key_state import (
    accounts_text,
    complete_certificates,
    complete_keys,
    contents,
    folder_files,
    left_out,
    observer_is_lost,
    put_existing,
    roster_text,
    server_names,
)
from swarm_cli.k8s.outside import remembered_domain, remembered_guests, split_nodes
from swarm_cli.k8s.secret_objects import (
    ACCOUNTS_FILE,
    ANNOTATION_BYTES,
    MOST_BYTES,
    ROSTER_FILE,
    Expected,
    annotation_bytes,
    as_objects,
    as_yaml,
    expected,
)
from swarm_cli.replace_file import replace_file

k8s_app = typer.Typer(name="k8s", help="Secrets of a cluster, and a look at it before `kubectl apply`.", no_args_is_help=True)
k8s_app.command()(check)

STANDARD = "-"
NODE_CONNECTIONS = 18
"""Of 8 verifiers, which is as many as an autoscaler in k8s/components starts."""
KEYS = Path("keys")


@k8s_app.command()
def secrets(
    nodes: Annotated[
        list[str],
        typer.Option(
            "--nodes",
            help="All nodes of the overlay, separated by commas; NAME=U... for one outside the cluster, which guests.txt keeps.",
        ),
    ],
    out: Annotated[str, typer.Option(help="File to write, readable only by its owner, or - to print.")] = STANDARD,
    keys: Annotated[
        Path | None,
        typer.Option(help="Folder of the keys: what is missing is made.  [default: keys, or none with --existing]"),
    ] = None,
    existing: Annotated[
        str,
        typer.Option(help="File, or - for standard input, with what the cluster has: `kubectl get secrets,configmaps -o json`."),
    ] = "",
    cert_manager: Annotated[
        bool,
        typer.Option("--cert-manager", help="Leave certificates to cert-manager: print neither nats-server-tls nor nats-ca."),
    ] = False,
    server_name: Annotated[
        list[str] | None, typer.Option(help="A further name or address of the servers for their certificate; may be repeated.")
    ] = None,
    domain: Annotated[
        str, typer.Option(help="With nats-expose: hub, for sites with servers of their own; domain.txt keeps it.")
    ] = "",
    node_connections: Annotated[
        int, typer.Option(min=2, help="Connections that one node may have on the swarm plane: two per verifier plus two.")
    ] = NODE_CONNECTIONS,
    namespace: Annotated[str, typer.Option(help="The overlay's namespace.")] = "swarm",
    new: Annotated[
        bool, typer.Option("--new", help="With --existing: the cluster has nothing of the swarm yet, so make every key.")
    ] = False,
) -> None:
    """Print every Secret and ConfigMap that the cluster overlay's pods mount and that is not in the
    repository: keys, accounts, certificates and the roster.

    The state is the folder of keys, or the cluster itself with --existing. Run it again whenever
    you like: it prints the same, a new node adds its keys, and a certificate that ends within 30
    days is made anew with the same key. New keys are named on standard error; with --existing only
    nodes that are added get any, unless --new says that the cluster has nothing yet. Apply with
    `kubectl apply --server-side --filename -`.
    """
    chosen, given = split_nodes(nodes)
    if OPERATOR in {*chosen, *given}:
        raise CommandError(f"no node may be called {OPERATOR!r}: the operator, who may do everything, has that name")
    wanted = expected(chosen, cert_manager=cert_manager)
    found, installed = _found(existing, wanted, namespace) if existing else ({}, False)
    with _folder(keys or (None if existing else KEYS)) as folder:
        if observer_is_lost(folder, found.get(ACCOUNTS_FILE, "")):
            raise CommandError("the cluster's servers admit spectators with a key that is not here: name its folder with --keys")
        if installed or (existing and not new):
            _refuse_lost(wanted, found, folder, namespace, installed=installed)
        guests = remembered_guests(folder, chosen, given)
        accounts: dict[str, str | None] = {**dict.fromkeys(chosen), **guests}
        put_existing(folder, found)
        if made_keys := complete_keys(folder, chosen):
            note(f"new keys: {', '.join(made_keys)}")
        made = {
            ACCOUNTS_FILE: accounts_text(folder, accounts, node_connections, remembered_domain(folder, domain)),
            ROSTER_FILE: roster_text(folder, chosen, found.get(ROSTER_FILE, "")),
        }
        if not cert_manager:
            for line in complete_certificates(folder, server_names(namespace, server_name or []), datetime.now(UTC)):
                note(line)
            if keys is None and existing and (folder / "ca.key").exists():
                note("the new authority's key is kept nowhere, so no second certificate can be signed with it: --keys keeps it")
        if others := left_out(folder, accounts, found.get(ACCOUNTS_FILE, "")):
            note(f"not among --nodes, so the servers refuse them from the next reload on: {', '.join(others)}")
        objects = as_objects(wanted, contents(folder, [file for each in wanted for file in each.files.values()], made), namespace)
    _deliver(objects, out)


def _found(existing: str, wanted: Sequence[Expected], namespace: str) -> tuple[dict[str, str], bool]:
    """Texts by file of what a cluster has, as kubectl prints a list of objects, and whether it has
    anything of a swarm.
    """
    try:
        text = sys.stdin.read() if existing == STANDARD else Path(existing).read_text()
        objects = listed(text)
        return found_files(objects, wanted, namespace), is_installed(objects, namespace)
    except OSError as error:
        raise CommandError(f"--existing {existing}: {error.strerror}: give the file that kubectl wrote") from None
    except ValueError as error:
        raise CommandError(
            f"--existing {existing}: {error}: give what `kubectl -n {namespace} get secrets,configmaps -o json` prints"
        ) from None


def _refuse_lost(wanted: Sequence[Expected], found: Mapping[str, str], folder: Path, namespace: str, *, installed: bool) -> None:
    """Refuse to make keys in place of those of a swarm that runs, which a list that is cut short
    would lack. Where nothing is `installed`, the folder has to have every key.
    """
    file = folder / ROSTER_FILE
    try:
        known = known_nodes(wanted, found, file.read_text() if file.exists() else "")
    except (RosterError, OSError, UnicodeDecodeError) as error:
        raise CommandError(f"the cluster's roster or {file}: {error}") from None
    has = {*found, *folder_files(folder)}
    missing = (
        lost(wanted, has, known) if installed else lost(wanted, has | {ACCOUNTS_FILE, ROSTER_FILE}, {each.node for each in wanted})
    )
    if not missing:
        return
    command = f"`kubectl -n {namespace} get secrets,configmaps -o json`"
    if installed:
        what, remedy = f"what namespace {namespace} has lacks {', '.join(missing)}", "name a folder with their keys with --keys"
    else:
        what, remedy = f"it has nothing of a swarm in namespace {namespace}", "for a first installation add --new"
    raise CommandError(f"{what}, and no key is made in place of one that may be in use: list all, with {command}, or {remedy}")


@contextmanager
def _folder(keys: Path | None) -> Iterator[Path]:
    if keys is not None:
        yield keys
        return
    with tempfile.TemporaryDirectory(prefix="swarm-keys-") as folder:
        yield Path(folder)


def _deliver(objects: Sequence[Mapping[str, Any]], out: str) -> None:
    """Refuse what Kubernetes would refuse, and say what client-side apply would."""
    for each in objects:
        size = sum(len(key) + len(value) for key, value in each["data"].items())
        if size * 3 // 4 > MOST_BYTES:
            raise CommandError(
                f"{each['kind']} {each['metadata']['name']} would have {size * 3 // 4 / 2**20:.1f} MiB and Kubernetes takes 1: "
                "for more nodes, or longer names, give the swarm's plane a server of its own (docs/operations.md)"
            )
    if any(annotation_bytes(each) > ANNOTATION_BYTES for each in objects):
        note("too large for client-side apply: use `kubectl apply --server-side --filename -`")
    text = as_yaml(objects)
    if out == STANDARD:
        typer.echo(text, nl=False)
    else:
        replace_file(Path(out), text, private=True)
        note(f"{out}: written, readable only by you: it holds keys")

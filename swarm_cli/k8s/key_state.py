"""The folder of keys that `swarm k8s secrets` makes, completes and remembers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from shared.identity import keys
from shared.identity.roster import RosterEntry, RosterError, parse_roster
from shared.plain_files import read_named
from shared.roles import OPERATOR, WATCH
from shared.text import error_text
from swarm_cli.errors import CommandError
from swarm_cli.k8s import certificates
from swarm_cli.k8s.secret_objects import ROSTER_FILE, SIGNING
from swarm_cli.nats.account_list import (
    NODE_KEYS,
    Plane,
    accounts_for,
    checked_domain,
    key_file,
    listed_nodes,
    make_missing_keys,
    named_node,
)
from swarm_cli.nats.server_config import render_accounts_only
from swarm_cli.replace_file import replace_file

NODES_FILE, GUESTS_FILE, DOMAIN_FILE = "nodes.txt", "guests.txt", "domain.txt"


def split_nodes(entries: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The nodes of the cluster, and the public keys of those outside it (NAME=U...).

    Raises:
        CommandError: an entry cannot be used, or a name is given both ways.
    """
    here: list[str] = []
    guests: dict[str, str] = {}
    for name, public_key in (named_node(part) for part in listed_nodes(entries)):
        if public_key is None:
            here.append(name)
        elif guests.get(name, public_key) != public_key:
            raise CommandError(f"--nodes gives two public keys to {name}: give one")
        else:
            guests[name] = public_key
    if both := sorted(set(here) & guests.keys()):
        raise CommandError(f"--nodes names {both[0]} with a public key and without: give it once")
    return here, guests


def remembered_nodes(folder: Path) -> list[str]:
    """The cluster's nodes, from the folder's file.

    Raises:
        CommandError: nobody has said which nodes there are, or a line of the file is not a name.
    """
    file = folder / NODES_FILE
    if not file.exists():
        raise CommandError(
            f"which nodes? Name all of the overlay with --nodes alpha,beta: {file}, which keeps them for later runs, does not exist"
        )
    try:
        here, guests = split_nodes(_remembered_text(file).split())
    except CommandError as error:
        raise CommandError(f"{file}: {error}") from None
    if guests or not here:
        raise CommandError(f"{file}: write the name of a node of the cluster on each line")
    return here


def remember(folder: Path, nodes: Sequence[str], guests: Mapping[str, str], domain: str) -> None:
    """Write them into the folder's files, once nothing can be refused any more."""
    kept = {
        NODES_FILE: "".join(f"{name}\n" for name in nodes),
        GUESTS_FILE: "".join(f"{name} {public_key}\n" for name, public_key in sorted(guests.items())),
        DOMAIN_FILE: f"{domain}\n" if domain else "",
    }
    for name, text in kept.items():
        if text or (folder / name).exists():
            replace_file(folder / name, text)


def remembered_guests(folder: Path, here: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The outside nodes in the folder's file, together with those `given`.

    Raises:
        CommandError: a line of the file cannot be used, names one of `here`, or has another key
            than is given.
    """
    file = folder / GUESTS_FILE
    lines = _remembered_text(file).splitlines()
    try:
        keyless, guests = split_nodes([line.strip().replace(" ", "=", 1) for line in lines if line.strip()])
    except CommandError as error:
        raise CommandError(f"{file}: {error}") from None
    if keyless:
        raise CommandError(f"{file}: {keyless[0]} has no public key: write `{keyless[0]} U...`, or remove the line")
    if other := sorted(name for name in guests.keys() & given.keys() if guests[name] != given[name]):
        raise CommandError(
            f"{file} has another key for {other[0]}, which would be shut out: to replace it, remove its line; for another node "
            "give another name"
        )
    guests = {**guests, **given}
    if both := sorted(set(here) & guests.keys()):
        remedy = "leave it out of --nodes, or remove its line to make its keys here"
        raise CommandError(f"{file} lists {both[0]} as a node outside the cluster: {remedy}")
    return guests


def remembered_domain(folder: Path, given: str) -> str:
    """The domain: `given`, or else the one in the folder's file. Raises CommandError if it is
    none.
    """
    file = folder / DOMAIN_FILE
    return given or checked_domain(_remembered_text(file).strip(), f"{file}:")


def _remembered_text(file: Path) -> str:
    """Empty if there is no file. Raises CommandError if it cannot be read."""
    try:
        return file.read_text() if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} cannot be read ({error_text(error)}): correct it, or give what it holds") from None


_AUTHORITY, _AUTHORITY_KEY, _CERTIFICATE, _KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
SET_ASIDE = "old"
"""Folder within the key folder for files that were replaced (docs/kubernetes-start.md)."""
_MOST_BYTES = 16 * 2**20


def complete_keys(folder: Path, nodes: Sequence[str]) -> list[str]:
    """Make the missing key files of `nodes` and of the swarm's operator. Returns the new ones, such
    as `alpha/trainer.nk`.
    """
    names = dict.fromkeys(nodes, (*NODE_KEYS, SIGNING)) | {OPERATOR: ("swarm", WATCH)}
    before = folder_files(folder)
    for node, of_node in names.items():
        make_missing_keys(folder, node, of_node)
    return [file for node, of_node in names.items() for name in of_node if (file := f"{node}/{name}.nk") not in before]


def folder_files(folder: Path) -> set[str]:
    """The files in the folder, such as `ca.crt` and `alpha/trainer.nk`."""
    return {str(path.relative_to(folder)) for pattern in ("*.*", "*/*.nk") for path in folder.glob(pattern)}


def accounts_text(folder: Path, nodes: Mapping[str, str | None], node_connections: int, domain: str = "") -> str:
    """The servers' accounts, which hold no secret. `nodes`: for each node None, or its public key
    if its node plane is elsewhere. `domain`: the servers' domain, if sites connect as leaves.
    """
    accounts = accounts_for(Plane.BOTH, dict(nodes), folder, node_connections)
    return render_accounts_only(accounts, watch_key=keys.load(key_file(folder, OPERATOR, WATCH)).public_key, domain=domain)


def roster_text(folder: Path, nodes: Sequence[str]) -> str:
    """The roster: the lines of `nodes`, and those of other nodes in the folder's roster.

    Raises:
        CommandError: a roster cannot be used.
    """
    try:
        file = folder / ROSTER_FILE
        entries = parse_roster(_text(file)) if file.exists() else {}
        for node in nodes:
            public_key = keys.load(key_file(folder, node, SIGNING)).public_key
            entries[node] = RosterEntry(node, public_key, entries[node].note if node in entries else "")
        text = "".join(f"{each.name} {each.public_key} {each.note}".rstrip() + "\n" for _, each in sorted(entries.items()))
        parse_roster(text)
    except (RosterError, OSError) as error:
        raise CommandError(f"roster {folder / ROSTER_FILE}: {error_text(error)}") from None
    return text


def complete_certificates(folder: Path, names: Sequence[str], now: datetime) -> list[str]:
    """Make the authority and the servers' certificate if they are missing, and renew the
    certificate, with the same key, if it expires soon or lacks one of `names`. A new certificate
    keeps the names of the one it replaces. Returns lines to print.

    Raises:
        CommandError: an irreplaceable file is missing, or a file cannot be read.
    """
    try:
        return list(_complete_certificates(folder, names, now))
    except certificates.CertificateError as error:
        raise CommandError(f"a certificate or key in {folder}: {error}") from None
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}: give this user access to it") from None


def _complete_certificates(folder: Path, names: Sequence[str], now: datetime) -> Iterator[str]:
    """If the authority's key is missing, which may be on purpose, the existing files are used as
    they are.
    """
    authority, authority_key, certificate, key = (folder / name for name in (_AUTHORITY, _AUTHORITY_KEY, _CERTIFICATE, _KEY))
    if not authority.exists() and not authority_key.exists():
        if certificate.exists():
            raise CommandError(f"{certificate} exists but {authority}, which clients need to trust it, is missing: add it")
        _write(authority_key, certificates.new_key())
        _write(authority, certificates.authority(_text(authority_key), "swarm-nats-ca", now))
    elif not authority.exists():
        raise CommandError(
            f"{authority_key} exists but {authority} is missing: put it back, or move the key away for a new authority"
        )
    for file in (authority_key, key):
        if file.exists() and file.stat().st_mode & 0o077:
            yield f"{file} is readable by other users: run `chmod 600 {file}`"
    if (ends := certificates.read(_text(authority)).not_after) - now < certificates.RENEWED_WITHIN:
        yield f'{authority} expires on {ends:%Y-%m-%d}: replace it in rounds (docs/kubernetes-change.md, "Rotate a certificate")'
    reason = _why_anew(certificate, key, authority, names, now)
    if not reason:
        return
    if authority_key.exists():
        others: list[str] = []
        if certificate.exists():
            of_key = "with the same key" if key.exists() else "with a new key"
            yield f"{certificate} {reason}: renewed {of_key}; servers use it from their next reload on"
            others = sorted(certificates.read(_text(certificate)).names - set(names))
        if others:
            yield f"{certificate} keeps the names {', '.join(others)}: to drop them, move it away and run this again"
        if not key.exists():
            _write(key, certificates.new_key())
        _write(certificate, certificates.server(_text(key), [*names, *others], _text(authority), _text(authority_key), now))
    elif certificate.exists() and key.exists():
        yield (
            f"{certificate} {reason}, and {authority_key}, which could sign a new one, is missing, so it stays as it is: put "
            f"ca.key into {folder} and run this again, or replace tls.crt and tls.key by some of your own authority"
        )
    else:
        raise CommandError(f"{authority_key} is missing to sign a certificate: put it, or tls.crt and tls.key, into {folder}")


def _why_anew(certificate: Path, key: Path, authority: Path, names: Sequence[str], now: datetime) -> str:
    """Why the servers' certificate must be renewed; empty if it need not be."""
    if not certificate.exists():
        return "is missing"
    if not key.exists():
        return f"lacks its key {key}"
    text = _text(certificate)
    said = certificates.read(text)
    if not certificates.belongs(_text(key), text):
        return "does not match the key in tls.key"
    if not certificates.is_signed_by(text, _text(authority)):
        return "is not signed by the authority in ca.crt"
    if said.not_after - now < certificates.RENEWED_WITHIN:
        return f"expires on {said.not_after:%Y-%m-%d}"
    missing = [name for name in names if name not in said.names]
    return f"lacks the name {', '.join(missing)}" if missing else ""


def left_out(folder: Path, nodes: Collection[str]) -> list[str]:
    """Nodes that have keys in the folder but are not in `nodes`. What was moved into `SET_ASIDE` is
    no node's.
    """
    return sorted({path.parent.name for path in folder.glob(f"*/{SIGNING}.nk")} - {SET_ASIDE} - set(nodes))


def _text(path: Path) -> str:
    """The text of a file of the folder. Raises OSError if it is no regular file or too large."""
    return read_named(path, _MOST_BYTES).decode()


def contents(folder: Path, files: Sequence[str], made: Mapping[str, str]) -> dict[str, str]:
    """Texts by file: from `made` if there, else from the folder."""
    return {file: made[file] if file in made else _text(folder / file) for file in files}


def _write(path: Path, text: str) -> None:
    replace_file(path, text, private=path.suffix == ".key")

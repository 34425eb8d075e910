"""The folder of keys that `swarm k8s secrets` makes, completes and remembers, and what a cluster
already has of it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shared.identity import keys
from shared.identity.roster import RosterEntry, RosterError, parse_roster
from shared.plain_files import read_named
from shared.roles import OBSERVER, OPERATOR, WATCH
from shared.text import error_text
from swarm_cli.errors import CommandError
from swarm_cli.k8s import certificates
from swarm_cli.k8s.secret_objects import (
    ACCOUNTS_FILE,
    AUTHORITY,
    ROSTER_FILE,
    SERVER_TLS,
    SIGNING,
    Expected,
    names_of_other_namespaces,
    not_names,
)
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


_TRUSTED = "ca.crt"
"""The only certificate file that clients hold too, so it must not be lost; the rest can be made
again."""
_ENTRIES = frozenset(("node.nk", "swarm.nk", "watch.nk", ACCOUNTS_FILE, ROSTER_FILE))
"""Entries that only a swarm's Secrets and ConfigMaps have, however they were made."""
Objects = Sequence[Mapping[str, Any]]


def listed(text: str) -> list[dict[str, Any]]:
    """The objects of a JSON list.

    Raises:
        ValueError: it is not a list of objects with kinds, names and entries.
    """
    if not text.strip():
        raise ValueError("it is empty, which happens if kubectl failed")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    kind = found.get("kind") if isinstance(found, dict) else None
    if not isinstance(kind, str) or not kind.endswith("List") or not isinstance(found.get("items"), list):
        raise ValueError("it is not a List of objects")
    for number, each in enumerate(found["items"], 1):
        if problem := _problem(each):
            raise ValueError(f"object {number} of the list {problem}")
    return list(found["items"])


def found_files(objects: Objects, wanted: Iterable[Expected], namespace: str) -> dict[str, str]:
    """The texts of the key folder's files that objects in `namespace` hold, by file.

    Raises:
        ValueError: an object is listed twice, or an entry is not text in base64.
    """
    held: dict[tuple[str, str], Mapping[str, Any]] = {}
    for each in objects:
        name = (each["kind"], each["metadata"]["name"])
        if each["metadata"].get("namespace") != namespace:
            continue
        if name in held:
            raise ValueError(f"{' '.join(name)} is in it twice")
        held[name] = each
    found: dict[str, str] = {}
    for expected in wanted:
        entries = held.get((expected.kind, expected.name), {}).get("data") or {}
        for key, file in expected.files.items():
            if key in entries:
                found[file] = _entry_text(entries[key], expected, key)
    return found


def is_installed(objects: Objects, namespace: str) -> bool:
    """Return whether `namespace` has anything of a swarm, even of nodes that were not named."""
    return any(
        each["metadata"].get("namespace") == namespace and not _ENTRIES.isdisjoint(each.get("data") or {}) for each in objects
    )


def known_nodes(wanted: Iterable[Expected], found: Mapping[str, str], roster: str) -> set[str]:
    """Nodes that exist already: `roster` or the cluster's roster lists them, the servers have an
    account for them, or one of their Secrets exists.

    Raises:
        RosterError: a roster is not valid.
    """
    with_secrets = {each.node for each in wanted if each.node and any(file in found for file in each.files.values())}
    in_roster = {*parse_roster(roster), *parse_roster(found.get(ROSTER_FILE, ""))}
    return with_secrets | in_roster | accounts_nodes(found.get(ACCOUNTS_FILE, ""))


def lost(wanted: Iterable[Expected], has: Collection[str], known: Collection[str]) -> list[str]:
    """Objects, such as `Secret alpha-trainer`, that a running swarm needs but that lack a file in
    `has`. Nodes not in `known` are being added and need none yet.
    """
    return [
        f"{each.kind} {each.name}"
        for each in wanted
        if (not each.node or each.node in known)
        and not all(file in has for file in each.files.values() if each.name not in (SERVER_TLS, AUTHORITY) or file == _TRUSTED)
    ]


def _problem(each: object) -> str:
    """Why this is not a Kubernetes object; empty if it is one."""
    metadata = each.get("metadata") if isinstance(each, dict) else None
    if not isinstance(each, dict) or not isinstance(metadata, dict):
        return "has no metadata"
    if not isinstance(each.get("kind"), str) or not isinstance(metadata.get("name"), str):
        return "has no kind or no name"
    data = each.get("data")
    if data is not None and not (isinstance(data, dict) and all(isinstance(text, str) for text in data.values())):
        return "has data that does not map names to texts"
    return ""


def _entry_text(text: str, each: Expected, key: str) -> str:
    secret = each.kind == "Secret"
    try:
        return (base64.b64decode(text, validate=True) if secret else text.encode()).decode()
    except ValueError:
        raise ValueError(f"{each.kind} {each.name}: {key} is not text{' in base64' if secret else ''}") from None


_AUTHORITY, _AUTHORITY_KEY, _CERTIFICATE, _KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
SET_ASIDE = "old"
"""Folder within the key folder for files that were replaced (docs/kubernetes-start.md)."""
_MOST_BYTES = 16 * 2**20
_BLOCKS = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_DROP = "--renew-certificate drops every name that is not asked for"


def put_existing(folder: Path, found: Mapping[str, str]) -> None:
    """Copy the cluster's files into the folder. A key in both must be the same: neither is
    replaced.

    Raises:
        CommandError: the keys differ, the cluster's is not a key, or the two authorities have no
            certificate in common.
    """
    for file, text in found.items():
        path = folder / file
        if file.endswith(".nk"):
            seed = text.strip()
            if not keys.is_seed(seed):
                raise CommandError(f"the cluster's Secret for {file} does not hold a key: restore it, or delete it and give --keys")
            if not path.exists():
                keys.create(path, seed.encode())
            elif _text(path).strip() != seed:
                raise CommandError(f"{path} and the cluster's Secret are different keys: move the file away, or delete that Secret")
        elif file in (_CERTIFICATE, _KEY, _AUTHORITY) and not path.exists():
            _write(path, text)
        elif file == _AUTHORITY and not set(_BLOCKS.findall(text)) & set(_BLOCKS.findall(_text(path))):
            raise CommandError(
                f"{path} is another authority than the cluster's, so no client would trust the servers: give the cluster's folder, "
                'or change the authority in rounds (docs/kubernetes-change.md, "Rotate a certificate")'
            )


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


def roster_text(folder: Path, nodes: Sequence[str], existing: str) -> str:
    """The roster: the lines of `nodes`, and those of other nodes in the folder's roster or in
    `existing`.

    Raises:
        CommandError: a roster cannot be used.
    """
    try:
        file = folder / ROSTER_FILE
        entries = parse_roster(existing) | (parse_roster(_text(file)) if file.exists() else {})
        for node in nodes:
            public_key = keys.load(key_file(folder, node, SIGNING)).public_key
            entries[node] = RosterEntry(node, public_key, entries[node].note if node in entries else "")
        text = "".join(f"{each.name} {each.public_key} {each.note}".rstrip() + "\n" for _, each in sorted(entries.items()))
        parse_roster(text)
    except (RosterError, OSError) as error:
        raise CommandError(f"roster {folder / ROSTER_FILE}: {error_text(error)}") from None
    return text


def complete_certificates(folder: Path, names: Sequence[str], now: datetime, *, renew: bool = False) -> list[str]:
    """Make the authority and the servers' certificate if they are missing, and renew the
    certificate, with the same key, if it expires soon or lacks one of `names`. A new certificate
    keeps the names of the one it replaces, but not with `renew`, which renews it always and for
    `names` alone. Returns lines to print.

    Raises:
        CommandError: an irreplaceable file is missing, or a file cannot be read.
    """
    try:
        return list(_complete_certificates(folder, names, now, renew=renew))
    except certificates.CertificateError as error:
        raise CommandError(f"a certificate or key in {folder}: {error}") from None
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}: give this user access to it") from None


def _complete_certificates(folder: Path, names: Sequence[str], now: datetime, *, renew: bool) -> Iterator[str]:
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
    if renew and certificate.exists():
        reason = reason or "is renewed as --renew-certificate asks"
    others = sorted(certificates.read(_text(certificate)).names - set(names)) if certificate.exists() else []
    if not reason:
        if elsewhere := names_of_other_namespaces(others):
            yield f"{certificate} also has {', '.join(elsewhere)}, of another namespace than --namespace: {_DROP}"
        if no_names := not_names(others):
            yield f"{certificate} also has {', '.join(map(repr, no_names))}, which no server can have: {_DROP}"
        return
    if authority_key.exists():
        if certificate.exists():
            of_key = "with the same key" if key.exists() else "with a new key"
            yield f"{certificate} {reason}: renewed {of_key}; servers use it from their next reload on"
        if others and renew:
            yield f"{certificate} no longer has the names {', '.join(others)}"
        elif others:
            yield f"{certificate} keeps the names {', '.join(others)}: {_DROP}"
        if not key.exists():
            _write(key, certificates.new_key())
        wanted = names if renew else [*names, *others]
        _write(certificate, certificates.server(_text(key), wanted, _text(authority), _text(authority_key), now))
    elif renew:
        raise CommandError(f"--renew-certificate: {authority_key} is missing to sign a certificate: put it into {folder}")
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


def left_out(folder: Path, nodes: Collection[str], accounts: str) -> list[str]:
    """Nodes that have keys in the folder or an account in `accounts` but are not in `nodes`. What
    was moved into `SET_ASIDE` is no node's.
    """
    in_folder = {path.parent.name for path in folder.glob(f"*/{SIGNING}.nk")} - {SET_ASIDE}
    return sorted((in_folder | accounts_nodes(accounts)) - set(nodes))


def _text(path: Path) -> str:
    """The text of a file of the folder. Raises OSError if it is no regular file or too large."""
    return read_named(path, _MOST_BYTES).decode()


def accounts_nodes(accounts: str) -> set[str]:
    """Nodes that have an account in `accounts`."""
    return {name for line in accounts.splitlines() if (name := _begun_node(line))}


def observer_is_lost(folder: Path, accounts: str) -> bool:
    """Return whether the cluster's servers admit spectators by a key that is missing from the
    folder.
    """
    return f"{{ # {OBSERVER}\n" in accounts and not key_file(folder, OPERATOR, OBSERVER).exists()


def contents(folder: Path, files: Sequence[str], made: Mapping[str, str]) -> dict[str, str]:
    """Texts by file: from `made` if there, else from the folder."""
    return {file: made[file] if file in made else _text(folder / file) for file in files}


def _begun_node(line: str) -> str:
    """The node named by a line `  NODE_ALPHA {` or `  SWARM_ALPHA {`; empty for any other line,
    such as a role's, NODE_ALPHA_TRAINER: names of nodes have no underscore.
    """
    plane, _, name = line.strip().removesuffix(" {").partition("_")
    is_node = line.endswith(" {") and plane in ("NODE", "SWARM") and name and "_" not in name
    return name.lower() if is_node and name.lower() != OBSERVER else ""


def _write(path: Path, text: str) -> None:
    replace_file(path, text, private=path.suffix == ".key")

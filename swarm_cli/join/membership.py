"""Binds a join folder to one hub, because its keys and roster were made for that hub. If the keys
were used with another hub, its operator could relay the real hub's challenge and log in as this
node.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography import x509
from msgspec import Meta
from msgspec.structs import replace

from shared.contracts.codec import decode
from shared.contracts.wire import Message, MessageError
from shared.drafts import create_once
from shared.os_words import in_words
from shared.plain_files import read_plain
from swarm_cli.errors import CommandError
from swarm_cli.invitation.token import Invitation
from swarm_cli.replace_file import replace_file

_MOST_BYTES = 65_536


class HubIdentity(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hub as a token names it. `authority`: SHA-256 of its authority's certificates; empty if the
    system's authorities are used. `reached`: whether it ever answered this folder's keys.

    A person may write the file, so a field that is not known is an error.
    """

    url: Annotated[str, Meta(max_length=1024)]
    authority: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    reached: bool = True


def hub_identity(invitation: Invitation) -> HubIdentity:
    """The hub that a token names, before it was reached."""
    certificates = invitation.authority
    authority = hashlib.sha256(certificates).hexdigest() if certificates else ""
    return HubIdentity(url=invitation.url, authority=authority, reached=False)


def bind(file: Path, authority: Path, invitation: Invitation, *, made: bool) -> None:
    """Record the token's hub in `file`, or check that it is the hub recorded there. A hub that
    never answered, as one at a mistyped address, knows no key, and is replaced by the token's. So
    is a known hub's authority, in the file `authority`, if the token only takes older certificates
    away: an operator who replaces it distributes the old and the new one first, and later the new
    one alone. `made`: whether the folder holds keys already; without a record they belong to an
    unknown hub.

    Raises:
        CommandError: the folder belongs to another hub, or the file cannot be used.
    """
    wanted = hub_identity(invitation)
    remedy = (
        f"keys are for one hub only. To join another swarm, move {file.parent} away or set SWARM_NODE__VAR_DIR to another folder, "
        "or ask for a token for a swarm with another name (nats.swarm_id). If the hub itself has a new address or authority, see "
        '"When the hub changes" in docs/joining.md'
    )
    try:
        if not file.exists():
            if made:
                raise CommandError(f"{file.parent} holds keys, but {file.name}, which names their hub, is missing: {remedy}")
            # If two commands run at once, the first one's file stays, and both read it.
            create_once(file, msgspec.json.encode(wanted))
        known = _read(file)
        if not known.reached and known != wanted:
            replace_file(file, msgspec.json.encode(wanted).decode())
            known = wanted
        elif known.url == wanted.url and known.authority != wanted.authority and _trusts_less(authority, known, invitation):
            known = replace(wanted, reached=known.reached)
            replace_file(file, msgspec.json.encode(known).decode())
    except OSError as error:
        raise CommandError(
            f"{file} cannot be used ({in_words(error)}): move it away if it is no file, or set node.var_dir to a writable folder"
        ) from None
    except MessageError as error:
        raise CommandError(f"{file} does not name a hub ({error}): {remedy}") from None
    if (known.url, known.authority) != (wanted.url, wanted.authority):
        raise CommandError(f"{file.parent} belongs to {_told(known)}, and the token is for {_told(wanted)}: {remedy}")


def _trusts_less(file: Path, known: HubIdentity, invitation: Invitation) -> bool:
    """Whether each certificate of the token is one of those that the folder trusts already, the
    newest among them: an older token, made before the newest was added, would take that away.
    """
    try:
        trusted = read_plain(file, _MOST_BYTES)
    except OSError:  # there is none, or nothing that could be the authority's certificates
        return False
    if not invitation.authority or hashlib.sha256(trusted).hexdigest() != known.authority:
        return False
    try:
        before, later = (x509.load_pem_x509_certificates(text) for text in (trusted, invitation.authority))
    except ValueError:
        return False
    return set(later) <= set(before) and max(before, key=lambda each: each.not_valid_before_utc) in later


def confirm(file: Path) -> None:
    """Record that the hub in `file` answered: from now on the folder is for it alone. Raises
    CommandError if the file cannot be written.
    """
    known = _read(file)
    if not known.reached:
        replace_file(file, msgspec.json.encode(replace(known, reached=True)).decode())


def _read(file: Path) -> HubIdentity:
    """JSON, so that a person can write it when the hub changes; earlier versions wrote MessagePack.
    Raises OSError and MessageError.
    """
    payload = read_plain(file, _MOST_BYTES)
    if not payload.lstrip().startswith(b"{"):
        return decode(payload, HubIdentity)
    try:
        return msgspec.json.decode(payload, type=HubIdentity)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError("malformed", str(error)[:200]) from None


def _told(hub: HubIdentity) -> str:
    return f"{hub.url} ({f'authority {hub.authority}' if hub.authority else 'no authority of its own'})"

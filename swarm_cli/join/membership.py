"""Which hub a join folder belongs to. Its keys and its roster were made for that hub: with another
one, whoever runs it could pass the real hub's challenge on and be let in as this node.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shared.contracts.codec import decode, encode
from shared.contracts.wire import Message, MessageError
from shared.policy_store.files import draft_in
from swarm_cli.errors import CommandError
from swarm_cli.invitation.token import Invitation


class HubIdentity(Message, frozen=True, kw_only=True):
    """A hub as a token names it. `authority`: SHA-256 of its certificates, empty where the system's
    authorities vouch for it.
    """

    url: Annotated[str, Meta(max_length=1024)]
    authority: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""


def hub_identity(invitation: Invitation) -> HubIdentity:
    """The hub of a token."""
    certificates = invitation.authority
    return HubIdentity(url=invitation.url, authority=hashlib.sha256(certificates).hexdigest() if certificates else "")


def bind(file: Path, invitation: Invitation, *, made: bool) -> None:
    """Record in `file` the token's hub, or find there that it is the same as ever. `made`: whether
    there are keys already, which without a record belong to an unknown hub.

    Raises:
        CommandError: the folder belongs to another hub, or the file cannot be used.
    """
    wanted = hub_identity(invitation)
    remedy = (
        f"keys are for one hub only. To join another swarm, move {file.parent} away or set SWARM_NODE__VAR_DIR to another folder, "
        "or ask for a token of a swarm with another name (nats.swarm_id). If the hub itself has a new address or authority, see "
        '"When the hub changes" in docs/joining.md'
    )
    try:
        if not file.exists():
            if made:
                raise CommandError(f"{file.parent} holds keys, and {file.name}, which says of which hub, is not there: {remedy}")
            _write_once(file, encode(wanted))
        known = decode(file.read_bytes(), HubIdentity)
    except OSError as error:
        raise CommandError(f"{file} cannot be used ({error.strerror}): set node.var_dir to a folder of your own") from None
    except MessageError as error:
        raise CommandError(f"{file} does not say of which hub it is ({error}): {remedy}") from None
    if known != wanted:
        raise CommandError(f"{file.parent} belongs to {_told(known)}, and the token is for {_told(wanted)}: {remedy}")


def _told(hub: HubIdentity) -> str:
    return f"{hub.url} ({f'authority {hub.authority}' if hub.authority else 'no authority of its own'})"


def _write_once(file: Path, payload: bytes) -> None:
    # Of two commands at once the first decides, and both read what it wrote.
    with draft_in(file.parent) as (stream, draft):
        stream.write(payload)
        os.fsync(stream.fileno())
        with suppress(FileExistsError):
            os.link(draft, file)

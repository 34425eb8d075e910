"""JetStream's advisories about API requests (`$JS.EVENT.ADVISORY.API`), and whether anybody should
have made a request. Pure.

The format is `io.nats.jetstream.advisory.v1.api_audit`. The server says who made the request: a
client in the streams' account, with its kind and user; or an account that imports the request, by
its name alone. A reply that became a request comes from the streams' account and from no client.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from shared.identity.permissions import Permissions, node_role, swarm_node
from shared.roles import ROLES

_LOOKING = (
    *("INFO", "STREAM.INFO.", "STREAM.NAMES", "STREAM.LIST", "STREAM.MSG.GET."),
    *("CONSUMER.INFO.", "CONSUMER.NAMES.", "CONSUMER.LIST."),
)
_MAX_BYTES = 8 * 2**20


class Verdict(Enum):
    """Who made a request."""

    LOOKED = "looked"
    """It changes nothing, so that it does not matter who did."""
    USUAL = "usual"
    """A role did what its permissions say."""
    OPERATOR = "operator"
    """A client in the account of the streams changed something. That is a person, or their key."""
    UNEXPECTED = "unexpected"
    """Neither: a way to JetStream's API that should not exist."""


class Client(msgspec.Struct, frozen=True):
    """Who asked, as far as the server says."""

    acc: str = ""
    svc: str = ""
    kind: str = ""
    user: str = ""


class Request(msgspec.Struct, frozen=True):
    """A request of JetStream's API."""

    subject: str
    client: Client = Client()


def parse(payload: bytes) -> Request | None:
    """The request in an advisory, or None for what is none."""
    try:
        return msgspec.json.decode(payload, type=Request) if len(payload) <= _MAX_BYTES else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def judge(account: str, request: Request) -> Verdict:
    """Who made a request in `account`, the one with the streams."""
    verb = request.subject.partition(".API.")[2]
    if verb.startswith(_LOOKING):
        return Verdict.LOOKED
    client = request.client
    if client.kind == "Client" and client.acc == account and not client.svc:
        return Verdict.OPERATOR
    permissions = permissions_of(account, client.acc)
    if permissions is not None and f"$JS.API.{verb}" in permissions.publish:
        return Verdict.USUAL
    return Verdict.UNEXPECTED


def permissions_of(account: str, guest: str) -> Permissions | None:
    """What the user in the account `guest` may do with the streams in `account`; None if it is
    nobody's (see `guest_account`).
    """
    name = guest.removeprefix(f"{account}_").lower()
    if guest == account or not guest.startswith(f"{account}_"):
        return None
    if account == "SWARM":
        return swarm_node(name)
    return node_role(account.removeprefix("NODE_").lower(), name) if name in ROLES else None

"""Reads JetStream's advisories about API requests (`$JS.EVENT.ADVISORY.API`) and judges whether the
sender of a request was entitled to make it. Pure.

The format is `io.nats.jetstream.advisory.v1.api_audit`. The server names who made the request: for
a client in the streams' account, its kind and user; for an account that imports the request, only
the account's name. A request forged as a reply subject comes from the streams' account without a
client.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from shared.identity.permissions import Permissions, node_role, swarm_node, user_account
from shared.roles import ROLES
from shared.transport.nats.claims import identity

_LOOKING = (
    *("INFO", "STREAM.INFO.", "STREAM.NAMES", "STREAM.LIST", "STREAM.MSG.GET."),
    *("CONSUMER.INFO.", "CONSUMER.NAMES.", "CONSUMER.LIST."),
)
_MAX_BYTES = 8 * 2**20


class Requester(Enum):
    """Who made a request."""

    LOOKED = "looked"
    """The request changes nothing, so its sender does not matter."""
    USUAL = "usual"
    """A role made a request that its permissions allow."""
    OPERATOR = "operator"
    """A client in the streams' account changed something: a person, or somebody with their key."""
    UNEXPECTED = "unexpected"
    """None of these: somebody reached JetStream's API in a way that should not exist."""


class AdvisoryClient(msgspec.Struct, frozen=True):
    """Who made the request, as far as the server says."""

    acc: str = ""
    svc: str = ""
    kind: str = ""
    user: str = ""


class ApiRequest(msgspec.Struct, frozen=True):
    """A request to JetStream's API."""

    subject: str
    client: AdvisoryClient = AdvisoryClient()


def parse(payload: bytes) -> ApiRequest | None:
    """The request in an advisory; None if `payload` is not an advisory."""
    try:
        return msgspec.json.decode(payload, type=ApiRequest) if len(payload) <= _MAX_BYTES else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def judge(account: str, request: ApiRequest) -> Requester:
    """Who made a request in `account`, the account that holds the streams."""
    verb = request.subject.partition(".API.")[2]
    if verb.startswith(_LOOKING):
        return Requester.LOOKED
    client = request.client
    requester = _name_of(client.acc, account)
    if client.kind == "Client" and requester == account and not client.svc:
        return Requester.OPERATOR
    permissions = permissions_of(account, requester)
    if permissions is not None and f"$JS.API.{verb}" in permissions.publish:
        return Requester.USUAL
    return Requester.UNEXPECTED


def _name_of(said: str, account: str) -> str:
    """The name of the requester's account: a server whose accounts are claims says its identity.
    Members of a swarm are not among the names, because no request to JetStream's API is theirs.
    """
    names = (account, *(user_account(account, role) for role in ROLES))
    return next((name for name in names if said == identity(name)), said)


def permissions_of(account: str, guest: str) -> Permissions | None:
    """Permissions of the user of the account `guest` with the streams in `account`; None if no user
    has that account (see `guest_account`).
    """
    name = guest.removeprefix(f"{account}_").lower()
    if guest == account or not guest.startswith(f"{account}_"):
        return None
    if account == "SWARM":
        return swarm_node(name)
    return node_role(account.removeprefix("NODE_").lower(), name) if name in ROLES else None

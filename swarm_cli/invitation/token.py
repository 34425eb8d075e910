"""An invitation to a swarm, as one word that can be sent and pasted. Pure.

What a token says is data: where the swarm is, what it takes, and perhaps a key. It comes from
somebody else, so reading it is bounded, typed and checked, and nothing in it names a file, a
program or a place to load anything from.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from typing import Annotated, Literal

from msgspec import Meta

from shared.config.task_spec import TaskSpec
from shared.contracts.codec import decode, encode
from shared.contracts.wire import Count, DatasetName, Message, MessageError, NodeId, PlainText, SchemaVersion, Seconds, SwarmId
from shared.identity.keys import is_public_key, is_seed

PLAIN, SECRET = "swarm1", "swarm1-secret"
"""First word of a token; the second holds a key and is not to be shown around."""
MAX_CHARS = 65_536
MAX_TASKS = 64
MAX_MEMBERS = 256
_CHECK_DIGITS = 16
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])"
_URL = re.compile(rf"(?:nats|tls)://{_HOST}(?::[0-9]{{1,5}})?")

BuiltInVerifier = Literal["reasoning_gym", "exact", "final_number", "math"]
"""One that an installed package brings is code that a token must not choose."""


class TokenError(ValueError):
    """A token cannot be used. The message says why and what to do, and never quotes the token."""


class OfferedTask(Message, frozen=True, kw_only=True):
    """A source of tasks that members of the swarm train on, as a `[[tasks]]` entry says it."""

    dataset: DatasetName
    config: Annotated[str, Meta(max_length=4096)] = "{}"
    """JSON, as in a task reference."""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    verifier: BuiltInVerifier = "reasoning_gym"


class Accepted(Message, frozen=True, kw_only=True):
    """What the inviting node takes in of others, as its `[verifier]` section says."""

    rule: Literal["same", "dataset", "any"]
    tasks: Annotated[list[OfferedTask], Meta(max_length=MAX_TASKS)]
    max_bytes: Count
    max_completions: Count
    max_tokens: Count
    max_answer_chars: Count
    max_age_s: Seconds
    max_clock_skew_s: Seconds


class Member(Message, frozen=True, kw_only=True):
    """A line of the roster: a node and the public key that it signs with."""

    node: NodeId
    public_key: Annotated[str, Meta(max_length=56)]


class Credential(Message, frozen=True, kw_only=True):
    """The key of one user of a secured hub: a node's, or the observer's."""

    user: NodeId
    seed: Annotated[str, Meta(pattern=r"^SU[A-Z2-7]{56}\Z")]


class Invitation(Message, frozen=True, kw_only=True):
    """All that a token says."""

    schema: SchemaVersion = 1
    url: Annotated[str, Meta(max_length=1024)]
    swarm_id: SwarmId
    swarm_schema: Count
    """Version of the messages that nodes share (`SWARM_SCHEMA_VERSION`)."""
    software: PlainText
    tasks_version: Annotated[str, Meta(pattern=r"^[0-9][0-9a-z.]{0,31}\Z")]
    """Of reasoning-gym: under another one a reference may mean another task."""
    accepts: Accepted
    roster: Annotated[list[Member], Meta(max_length=MAX_MEMBERS)] = []
    authority: Annotated[bytes, Meta(max_length=16_384)] = b""
    """PEM certificates behind the hub's; empty: the system's authorities."""
    credential: Credential | None = None


def write_token(invitation: Invitation) -> str:
    """The token. Raises TokenError for an invitation that nobody could read."""
    body = encode(invitation)
    payload = base64.urlsafe_b64encode(body).decode().rstrip("=")
    token = f"{SECRET if invitation.credential else PLAIN}.{payload}.{_check(body)}"
    read_token(token)
    return token


def read_token(text: str) -> Invitation:
    """What a token says. White space in it, as mail puts there, does not matter.

    Raises:
        TokenError: it is no token, damaged, of another version, or says what no invitation may.
    """
    if len(text) > MAX_CHARS:
        raise TokenError(f"the token is longer than {MAX_CHARS:,} characters: paste what `swarm invite` printed, and no more")
    word, _, rest = "".join(text.split()).partition(".")
    payload, _, check = rest.partition(".")
    if word not in (PLAIN, SECRET):
        if re.fullmatch(r"swarm[0-9]+(-secret)?", word):
            raise TokenError("the token is of another version of this software: update the older of the two sides")
        raise TokenError(f"this is no token: one begins with {PLAIN}. or {SECRET}. and comes from `swarm invite`")
    try:
        body = base64.b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        body = b""
    if not body or check != _check(body):
        raise TokenError("the token is damaged (its checksum does not fit): copy it again, from the first character to the last")
    try:
        invitation = decode(body, Invitation)
    except MessageError as error:
        raise TokenError(f"the token cannot be used ({error}): ask for one of this version of the software") from None
    if (word == SECRET) != (invitation.credential is not None):
        raise TokenError("the token's first word and what it holds do not fit: ask for another one")
    _check_invitation(invitation)
    return invitation


def checked_urls(text: str) -> str:
    """`text` itself: one NATS server, or several separated by commas.

    Raises:
        TokenError: another scheme, a name and password, a path, or a character that no address has.
    """
    urls = text.split(",")
    if len(urls) > 8 or not all(_URL.fullmatch(url) for url in urls):
        raise TokenError("the server's address is none: nats://HOST:PORT or tls://HOST:PORT, up to 8 of them, separated by commas")
    if len({url.partition("://")[0] for url in urls}) > 1:
        raise TokenError("some addresses are tls:// and some nats://, which is not encrypted: give all of them with tls://")
    return text


def task_specs(invitation: Invitation) -> list[dict[str, object]]:
    """The offered tasks as `[[tasks]]` entries. Their settings are checked where they are used."""
    return [
        {"dataset": task.dataset, "config": json.loads(task.config), "weight": task.weight, "verifier": task.verifier}
        for task in invitation.accepts.tasks
    ]


def _check(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:_CHECK_DIGITS]


def _check_invitation(invitation: Invitation) -> None:
    """What the types of the fields do not say."""
    encrypted = checked_urls(invitation.url).startswith("tls://")
    if (invitation.credential or invitation.authority) and not encrypted:
        raise TokenError("the token holds a key or a certificate for a server that does not encrypt: it needs a tls:// address")
    if invitation.credential is not None and not is_seed(invitation.credential.seed):
        raise TokenError("the key in the token is none: ask for another token")
    if invitation.authority and not re.fullmatch(
        rb"(-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+\n-----END CERTIFICATE-----\n)+", invitation.authority
    ):
        raise TokenError("the certificate in the token is none: ask for another token")
    for names in ([member.node for member in invitation.roster], [member.public_key for member in invitation.roster]):
        if len(set(names)) != len(names):
            raise TokenError("the token's roster names a node or a key twice: ask for another token")
    if not all(is_public_key(member.public_key) for member in invitation.roster):
        raise TokenError("the token's roster holds a key that is none: ask for another token")
    try:
        for spec in task_specs(invitation):
            TaskSpec.model_validate(spec)
    except (ValueError, RecursionError):
        raise TokenError("a task in the token has settings that no task has: ask for another token") from None

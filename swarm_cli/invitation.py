"""Invitations: the token that `swarm invite` prints and `swarm join` reads."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import sys
import unicodedata
from typing import Annotated, Literal

from msgspec import Meta

from shared.contracts.codec import decode_foreign, encode
from shared.contracts.wire import Count, DatasetName, Message, MessageError, NodeId, PlainText, SchemaVersion, Seconds, SwarmId
from shared.identity.keys import is_public_key, is_seed
from shared.roles import OPERATOR, WATCH
from swarm_cli.errors import CommandError

PLAIN, SECRET = "swarm1", "swarm1-secret"
"""The prefix of a token; a token with the second one holds a key and must be kept secret."""
MAX_CHARS = 65_536
MAX_TASKS = 64
MAX_MEMBERS = 256
_CHECK_DIGITS = 16
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])"
_URL = re.compile(rf"(?:nats|tls)://{_HOST}(?::[0-9]{{1,5}})?")

BuiltInVerifier = Literal["reasoning_gym", "exact", "final_number", "math"]
"""Only built-in verifiers: one from an installed package is code that a token must not choose."""


class TokenError(ValueError):
    """A token cannot be used. The message names the cause and the remedy, and never quotes the
    token.
    """


class OfferedTask(Message, frozen=True, kw_only=True):
    """A source of tasks that members of the swarm train on, with the fields of a
    `[[tasks]]` entry.
    """

    dataset: DatasetName
    config: Annotated[str, Meta(max_length=4096)] = "{}"
    """JSON, as in a task reference."""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    verifier: BuiltInVerifier = "reasoning_gym"


class Accepted(Message, frozen=True, kw_only=True):
    """Rules of the inviting node for foreign groups, from its `[verifier]` section."""

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
    """The contents of a token."""

    schema: SchemaVersion = 1
    url: Annotated[str, Meta(max_length=1024)]
    swarm_id: SwarmId
    swarm_schema: Count
    """Version of the messages that nodes share (`SWARM_SCHEMA_VERSION`)."""
    software: PlainText
    tasks_version: Annotated[str, Meta(pattern=r"^[0-9][0-9a-z.]{0,31}\Z")]
    """Version of reasoning-gym: with another version a reference may mean another task."""
    accepts: Accepted
    roster: Annotated[list[Member], Meta(max_length=MAX_MEMBERS)] = []
    authority: Annotated[bytes, Meta(max_length=16_384)] = b""
    """PEM certificates of the hub's authority; empty: the system's authorities."""
    credential: Credential | None = None


def write_token(invitation: Invitation) -> str:
    """The token. Raises TokenError for an invitation that `read_token` would refuse."""
    body = encode(invitation)
    payload = base64.urlsafe_b64encode(body).decode().rstrip("=")
    token = f"{SECRET if invitation.credential else PLAIN}.{payload}.{_check(body)}"
    read_token(token)
    return token


_AROUND = frozenset("\"'`<>()\u201c\u201d\u2018\u2019")


def read_token(text: str) -> Invitation:
    """The contents of a token. What mail programs, chats and people put around or into it is
    ignored: white space, quotes, brackets, invisible characters, and the command before it.

    Raises:
        TokenError: it is not a token, is damaged or of another version, or holds invalid values.
    """
    if len(text) > MAX_CHARS:
        raise TokenError(f"the token is longer than {MAX_CHARS:,} characters: paste only what `swarm invite` printed")
    bare = "".join(each for each in text if not each.isspace() and each not in _AROUND and unicodedata.category(each) != "Cf")
    begin = re.search(r"swarm[0-9]+(-secret)?\.", bare)
    word, _, rest = bare[begin.start() if begin else 0 :].partition(".")
    payload, _, check = rest.partition(".")
    if word not in (PLAIN, SECRET):
        if re.fullmatch(r"swarm[0-9]+(-secret)?", word):
            raise TokenError("the token was made by another version of this software: update the older side")
        raise TokenError(f"this is not a token, which begins with {PLAIN}. or {SECRET}.: paste what `swarm invite` printed")
    try:
        body = base64.b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        body = b""
    if not body or check != _check(body):
        raise TokenError("the token is damaged (its checksum is wrong): copy it again, from the first character to the last")
    try:
        invitation = decode_foreign(body, Invitation)
    except MessageError as error:
        raise TokenError(f"the token cannot be used ({error}): ask for one made by this version of the software") from None
    if (word == SECRET) != (invitation.credential is not None):
        raise TokenError("the token's prefix and contents contradict each other about a key: ask for another token")
    _check_invitation(invitation)
    return invitation


def checked_urls(text: str) -> str:
    """`text`, if it is the address of one NATS server, or of several separated by commas.

    Raises:
        TokenError: it has another scheme, a name and password, a path, or an invalid character.
    """
    urls = text.split(",")
    if len(urls) > 8 or not all(_URL.fullmatch(url) for url in urls):
        raise TokenError("the server's address is not valid: use nats://HOST:PORT or tls://HOST:PORT, up to 8, comma-separated")
    if len({url.partition("://")[0] for url in urls}) > 1:
        raise TokenError("some addresses are tls:// and some nats://, which is not encrypted: use tls:// for all of them")
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
    """Check what the types of the fields cannot."""
    encrypted = checked_urls(invitation.url).startswith("tls://")
    if (invitation.credential or invitation.authority) and not encrypted:
        raise TokenError("the token holds a key or a certificate but no tls:// address to use it with: ask for another token")
    if invitation.credential is not None and invitation.credential.user in (OPERATOR, WATCH):
        raise TokenError(
            f"the token holds a key of the user {invitation.credential.user}, which is no node: tell the operator to replace that "
            "key, and ask for another token"
        )
    if invitation.credential is not None and not is_seed(invitation.credential.seed):
        raise TokenError("the key in the token is not valid: ask for another token")
    if invitation.authority and not re.fullmatch(
        rb"(-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+\n-----END CERTIFICATE-----\n)+", invitation.authority
    ):
        raise TokenError("the certificate in the token is not valid: ask for another token")
    for names in ([member.node for member in invitation.roster], [member.public_key for member in invitation.roster]):
        if len(set(names)) != len(names):
            raise TokenError("the token's roster names a node or a key twice: ask for another token")
    if not all(is_public_key(member.public_key) for member in invitation.roster):
        raise TokenError("a key in the token's roster is not valid: ask for another token")
    try:
        for spec in task_specs(invitation):
            if _is_deep(spec["config"]):
                raise ValueError("nested deeper than any dataset's settings")
    except (ValueError, RecursionError):
        raise TokenError("a task in the token has invalid settings: ask for another token") from None


def _is_deep(value: object, levels: int = 16) -> bool:
    if levels == 0:
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_is_deep(each, levels - 1) for each in inner)


TOKEN_VARIABLE = "JOIN_TOKEN"
"""It has no SWARM_ prefix because it is not a setting."""


def given_text(argument: str | None) -> str:
    """The token's text: from standard input if `argument` is `-`, from the environment if it is
    empty. The variable is removed, so that processes started from here do not inherit it.

    Raises:
        CommandError: no token was given.
    """
    in_environment = os.environ.pop(TOKEN_VARIABLE, "")
    text = sys.stdin.read(MAX_CHARS + 1) if argument == "-" else argument or in_environment
    if not text.strip():
        raise CommandError(
            f"no token was given: put it after the command, pipe it in with `-`, or set {TOKEN_VARIABLE}, which other users of "
            "this machine cannot see"
        )
    return text.strip()


def given_invitation(text: str) -> Invitation:
    """The token's contents. Raises CommandError if it cannot be used."""
    try:
        return read_token(text)
    except TokenError as error:
        raise CommandError(str(error)) from None

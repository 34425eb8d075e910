"""Claims (JWTs of NATS, version 2), with which a server admits users whose accounts are not in its
configuration.

An account's identity follows from its name: an account's public key whose private half nobody has.
A user signs its own claims with the key that it has anyway. Its account names the same key as a
signing key that is bound to a role, so the claims carry no permissions and the server applies those
of the account. Ed25519 keys of users, accounts and operators differ only in their first byte.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from functools import cache
from typing import Any

import nkeys

Key = Any
"""A pair of `nkeys`."""
ACCOUNT, OPERATOR = nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_OPERATOR
_HEADER = b'{"typ":"JWT","alg":"ed25519-nkey"}'


def as_kind(user_key: str, kind: int) -> str:
    """The same public key (`U...`) as one of an account (`A...`) or an operator (`O...`)."""
    return _encoded(kind, base64.b32decode(user_key)[1:33])


@cache
def identity(account: str) -> str:
    """The identity (`A...`) of the account of this name."""
    return _encoded(ACCOUNT, hashlib.sha256(f"swarm/{account}".encode()).digest())


def key_of(seed: str) -> Key:
    """The key of a seed (`SU...`). Raises nkeys' errors for what is none."""
    return nkeys.from_seed(bytearray(seed.strip().encode()))


def public_key(key: Key) -> str:
    """The public half as one of a user (`U...`)."""
    return bytes(key.public_key).decode()


def user_claims(key: Key, account: str) -> str:
    """The claims of the holder of `key` as a user of the account of this name."""
    return signed("user", public_key(key), account, {"issuer_account": identity(account)}, key, ACCOUNT)


def signed(kind: str, subject: str, name: str, body: dict[str, Any], key: Key, as_a: int, *, expires_at: int | None = None) -> str:
    """Claims about `subject`, signed by `key` as an account or an operator. `expires_at`: Unix time
    from which servers refuse them.
    """
    claims: dict[str, Any] = {"iat": int(time.time()), "iss": as_kind(public_key(key), as_a), "sub": subject, "name": name}
    if expires_at is not None:
        claims["exp"] = expires_at
    claims["nats"] = {**body, "type": kind, "version": 2}
    claims["jti"] = hashlib.sha256(json.dumps(claims, sort_keys=True).encode()).hexdigest()
    text = _b64(_HEADER) + b"." + _b64(json.dumps(claims, separators=(",", ":")).encode())
    return (text + b"." + _b64(key.sign(text))).decode()


def claims_of(token: str) -> dict[str, Any]:
    """What a token says; its signature is not checked. Raises ValueError if it is none."""
    parts = token.split(".")
    if len(parts) != 3:
        raise ValueError("three parts were expected")
    found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found


def credentials_text(key_seed: str, account: str) -> str:
    """A .creds file: claims and seed of a user, for programs that take no bare key."""
    user = user_claims(key_of(key_seed), account)
    return (
        f"-----BEGIN NATS USER JWT-----\n{user}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{key_seed}\n------END USER NKEY SEED------\n"
    )


def _b64(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def _encoded(kind: int, raw: bytes) -> str:
    whole = bytearray([kind]) + raw
    return base64.b32encode(bytes(whole) + bytes(nkeys.crc16_checksum(whole))).decode().rstrip("=")

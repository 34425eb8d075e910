"""Credentials and TLS of a connection to NATS. An error that a retry cannot fix becomes
`AccessDenied`, with the file and the remedy. Commands check keys and authorities with it without
loading nats-py.
"""

from __future__ import annotations

import math
import re
import ssl
import time
from typing import Any

import nkeys

from shared.plain_files import read_named
from shared.text import error_text
from shared.transport.base import AccessDenied
from shared.transport.nats.claims import claims_of

MAX_AUTHORITY_BYTES = 2**20
"""Of a file with authorities. A system's own, with some 150 of them, has a fifth of that."""
MAX_KEY_BYTES = 2**16
"""Of a seed or .creds file. A JWT with many permissions takes some thousand bytes."""
NO_TLS = "the server offers no TLS"
_HAS_EXPIRED = 10
"""X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL."""
_REFUSALS = ("authorization violation", "authentication expired", "authentication revoked", "user authentication")


def credential_settings(key_file: str | None, ca_file: str | None) -> dict[str, Any]:
    """Arguments for nats-py's `connect`. Raises AccessDenied for files that cannot be used, and for
    claims that have run out.
    """
    found: dict[str, Any] = {}
    if key_file:
        text = _read(key_file)
        if "BEGIN NATS USER JWT" in text:
            _refuse_expired(key_file, text)
            found["user_credentials"] = key_file
        else:
            found["nkeys_seed_str"] = _checked_seed(key_file, text.strip())
    if ca_file:
        try:
            found["tls"] = authority_context(ca_file)
        except OSError as error:
            raise AccessDenied(
                f"certificate authority {ca_file}: {error_text(error)}: give the PEM file of the authority that signed the "
                "server's certificate"
            ) from None
    return found


def authority_context(ca_file: str) -> ssl.SSLContext:
    """A context that trusts the authorities in a PEM file.

    Raises:
        ssl.SSLError: the file holds no certificate.
        OSError: it cannot be read, is no regular file or has more than `MAX_AUTHORITY_BYTES`.
    """
    read_named(ca_file, MAX_AUTHORITY_BYTES)  # OpenSSL would read without an end
    return ssl.create_default_context(cafile=ca_file)


def denial(error: Exception, url: str, key_file: str | None, ca_file: str | None) -> str | None:
    """Why the server will never accept this connection, with the remedy; None for any other
    failure.
    """
    if NO_TLS in str(error):
        return f"{url}: {NO_TLS}, and the url or a CA file asks for it: add a `tls` block to the server's configuration"
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code == _HAS_EXPIRED:
        return (
            f"{url}: the server's certificate has run out (or this machine's clock is wrong): whoever runs the server makes a new "
            "one, on Kubernetes with `swarm k8s secrets`, and reloads it"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        trusted = f"the authority in {ca_file}" if ca_file else "the system's authorities"
        return (
            f"{url}: the server's certificate does not pass ({error}): it must be for the host name in the url and signed by "
            f"{trusted}; set nats.node_ca_file or nats.swarm_ca_file to the authority's PEM file"
        )
    if not is_key_refusal(error):
        return None
    if not key_file:
        return (
            f"{url}: the server wants a key and none is given: set nats.node_key_file or nats.swarm_key_file to a file "
            "with an nkey seed (`swarm nats keys` makes one) whose public key the server's configuration lists"
        )
    return (
        f"{url}: the server refuses the key in {key_file}: its public key must be in the server's configuration "
        "(`swarm nats config` writes it, reload the server afterwards; a hub with claims gets it by --push, and again if it lost "
        "them), or it is another plane's key"
    )


def is_key_refusal(error: Exception) -> bool:
    """Check whether the server does not know the key, or no longer knows it."""
    return any(words in str(error).lower() for words in _REFUSALS)


def _read(path: str) -> str:
    try:
        return read_named(path, MAX_KEY_BYTES).decode()
    except FileNotFoundError:
        raise AccessDenied(
            f"key file {path} does not exist: create it with `swarm nats keys`, or correct nats.node_key_file or "
            "nats.swarm_key_file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise AccessDenied(
            f"key file {path} cannot be read ({error_text(error)}): make it readable for this process's user"
        ) from None


def _refuse_expired(path: str, text: str) -> None:
    """Raises AccessDenied. A server refuses such claims without saying why."""
    token = re.search(r"BEGIN NATS USER JWT-+\s*(\S+)", text)
    try:
        ends = claims_of(token[1] if token else "").get("exp") or 0
        left_s = float(ends) - time.time() if ends else math.inf
    except (TypeError, ValueError):
        raise AccessDenied(f"key file {path} holds no user's claims: get the .creds file again from who made it") from None
    if left_s <= 0:
        raise AccessDenied(
            f"key file {path}: its claims ran out {-left_s / 3600:.1f} h ago (or this machine's clock is wrong): "
            "get a new .creds file from who made it"
        )


def _checked_seed(path: str, seed: str) -> str:
    try:
        nkeys.from_seed(bytearray(seed.encode()))
    except Exception as error:  # nkeys raises its own errors and those of binascii and nacl
        raise AccessDenied(
            f"key file {path} holds neither an nkey seed nor NATS credentials ({type(error).__name__}): "
            "create one with `swarm nats keys`"
        ) from None
    return seed

"""`swarm nats certificates`: when the certificates of servers and in files expire."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from shared.config import NodeConfig
from shared.os_words import in_words
from shared.plain_files import read_named
from shared.text import visible
from swarm_cli.chosen_config import ConfigOption, load_chosen
from swarm_cli.errors import CommandError

DEFAULT_PORT = 4222
ANSWER_S = 5.0
_INFO_BYTES = 65_536
_FILE_BYTES = 2**20
DIGITS = 16
"""Of a digest: enough to see whether two servers present the same certificate."""
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Found:
    """A certificate, where it was found and when it expires. `digest`: SHA-256 of its DER form."""

    where: str
    subject: str
    ends: datetime
    digest: str

    def days_left(self, now: datetime) -> float:
        """Negative once it has expired."""
        return (self.ends - now).total_seconds() / _DAY_S


def certificates(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT",
            help="PEM files, and servers as tls://HOST:PORT (client or leaf port); several may be separated by commas.  "
            "[default: servers and authorities of the configuration]",
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=0, help="Exit with 1 if a certificate lasts less than this many days.")] = 30,
    config: ConfigOption = None,
) -> None:
    """Print how many days each certificate has left, the fewest first.

    For a server this is the certificate that it presents now; a renewed file takes effect when the
    server is reloaded. The digest tells whether two are the same. Nothing is verified, so that
    expired certificates can be read too. No key is shown.
    """
    wanted = [part for each in what or _configured(load_chosen(config)) for part in each.split(",")]
    if what and not all(part.strip() for part in wanted):
        raise CommandError(
            f"{','.join(what)[:80]!r} has an empty name: give files or tls://HOST:PORT; if it is a variable, set it, and leave the "
            "argument out for those of the configuration"
        )
    if not wanted:
        raise CommandError("the configuration names no server with TLS and no authority: name files or tls://HOST:PORT")
    now = datetime.now(UTC)
    found = sorted((each for name in wanted for each in _look(name)), key=lambda each: each.ends)
    for each in found:
        typer.echo(_line(each, now))
    short = [each for each in found if each.days_left(now) < days]
    if short:
        raise CommandError(
            f"{len(short)} of {len(found)} certificates expire in less than {days} days: renew them and reload their servers "
            '(docs/kubernetes-change.md, "Rotate a certificate")'
        )


def read_pem(text: bytes, where: str) -> list[Found]:
    """The certificates of a PEM file. Raises CommandError if it has none."""
    try:
        return [_found(each, where) for each in x509.load_pem_x509_certificates(text)]
    except ValueError:
        raise CommandError(f"{where} holds no PEM certificate: give a file with -----BEGIN CERTIFICATE-----") from None


def shown_by(url: str) -> Found:
    """The certificate that a NATS server presents to a client or leaf that connects now.

    Raises:
        CommandError: no NATS server with TLS answers.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError as error:
        raise CommandError(f"{visible(url, 200)}: {error}: give tls://HOST:PORT") from None
    # Verify nothing, not even the name: the question is when the certificate expires, and expired
    # ones matter most.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout=ANSWER_S) as connection:
            _expect_tls(connection, url)
            with context.wrap_socket(connection, server_hostname=host) as session:
                shown = session.getpeercert(binary_form=True)
    except OSError as error:
        raise CommandError(
            f"{url}: {in_words(error)}: check that the server runs and that this is its client or leaf port"
        ) from None
    if not shown:
        raise CommandError(f"{url}: the server presents no certificate: check that this is its client or leaf port")
    return _found(x509.load_der_x509_certificate(shown), url)


def _expect_tls(connection: socket.socket, url: str) -> None:
    """Read the first line of a NATS server, which is not encrypted, and refuse a server without
    TLS. Reads byte by byte, because the bytes after it belong to the TLS handshake.
    """
    line, until = b"", time.monotonic() + ANSWER_S
    while not line.endswith(b"\n") and len(line) < _INFO_BYTES:
        connection.settimeout(max(0.01, until - time.monotonic()))
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    try:
        said = json.loads(line.removeprefix(b"INFO "))
        if not isinstance(said, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise CommandError(f"{url}: no NATS server answers there: check the host and the port") from None
    if not (said.get("tls_required") or said.get("tls_available")):
        raise CommandError(f"{url}: this server has no TLS and therefore no certificate: leave it out")


def _look(name: str) -> Sequence[Found]:
    if "://" in name:
        return [shown_by(name)]
    try:
        return read_pem(read_named(Path(name), _FILE_BYTES), name)
    except OSError as error:
        remedy = "`swarm k8s secrets` writes certificates into its folder `keys`, such as keys/ca.crt"
        missing = isinstance(error, FileNotFoundError)
        raise CommandError(
            f"{name} cannot be read: {error.strerror}: {remedy if missing else 'give this user access to it'}"
        ) from None


def _configured(config: NodeConfig) -> list[str]:
    """The servers with TLS and the authorities of a node, each once."""
    nats = config.nats
    urls = [url for url in (nats.node_url, nats.swarm_url) if url is not None and url.startswith("tls://")]
    return list(dict.fromkeys(part for part in (*urls, nats.node_ca_file, nats.swarm_ca_file) if part))


def _found(certificate: x509.Certificate, where: str) -> Found:
    digest = certificate.fingerprint(hashes.SHA256()).hex()
    return Found(where, certificate.subject.rfc4514_string(), certificate.not_valid_after_utc, digest)


def _line(found: Found, now: datetime) -> str:
    left = found.days_left(now)
    days = f"{int(left)} days left" if left >= 0 else f"expired {int(-left)} days ago"
    until = f"{found.ends:%Y-%m-%d %H:%M} UTC"
    return f"{days}, until {until}: {visible(found.where)} ({visible(found.subject)}, SHA-256 {found.digest[:DIGITS]})"

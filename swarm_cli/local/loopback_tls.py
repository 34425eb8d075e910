"""A key and a certificate for one server on 127.0.0.1 that has exactly one client: this process.

Prometheus does not check the Host header, so a page on the Internet whose name suddenly resolves to
127.0.0.1 could read it (DNS rebinding), and so could other users of the machine. TLS that demands
this certificate from every client stops both. The certificate is made at each start and is
self-signed: RFC 5280 in DER, with an Ed25519 key as in RFC 8410. No other program is needed.
"""

from __future__ import annotations

import base64
import os
import secrets
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from nacl.signing import SigningKey

VALID_FOR = timedelta(days=365)
_CLOCK_SKEW = timedelta(days=1)
_ED25519 = bytes.fromhex("300506032b6570")
_COMMON_NAME, _ALTERNATIVE_NAME = bytes.fromhex("0603550403"), bytes.fromhex("0603551d11")
_LOOPBACK = bytes([127, 0, 0, 1])
_SEQUENCE, _SET, _INTEGER, _BITS, _OCTETS, _UTF8 = 0x30, 0x31, 0x02, 0x03, 0x04, 0x0C
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18
_VERSION, _EXTENSIONS, _IP_ADDRESS = 0xA0, 0xA3, 0x87


class LoopbackTls:
    """Two files in `folder`, readable only by their owner, and the TLS settings made from them for
    either side.
    """

    def __init__(self, folder: Path, now: datetime | None = None) -> None:
        key = SigningKey.generate()
        self.certificate = folder / "loopback.pem"
        self.key = folder / "loopback.key"
        for path, text in ((self.certificate, certificate(key, now or datetime.now(UTC))), (self.key, private_key(key))):
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)

    def web_config(self) -> dict[str, object]:
        """For Prometheus' `--web.config.file`: serve with the key and refuse clients without it."""
        files = {"cert_file": str(self.certificate.resolve()), "key_file": str(self.key.resolve())}
        client = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(self.certificate.resolve())}
        return {"tls_server_config": {**files, **client}}

    def client(self) -> ssl.SSLContext:
        """For this process's requests: trust only that certificate, and present it."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.load_cert_chain(self.certificate, self.key)
        return context


def certificate(key: SigningKey, now: datetime) -> str:
    """A self-signed certificate for 127.0.0.1, as PEM."""
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_UTF8, b"swarm dashboard"))))
    validity = _der(_SEQUENCE, _time(now - _CLOCK_SKEW), _time(now + VALID_FOR))
    public = _der(_SEQUENCE, _ED25519, _der(_BITS, b"\0", bytes(key.verify_key)))
    address = _der(_SEQUENCE, _ALTERNATIVE_NAME, _der(_OCTETS, _der(_SEQUENCE, _der(_IP_ADDRESS, _LOOPBACK))))
    serial = _der(_INTEGER, b"\x01" + secrets.token_bytes(15))
    version = _der(_VERSION, _der(_INTEGER, b"\x02"))
    extensions = _der(_EXTENSIONS, _der(_SEQUENCE, address))
    signed = _der(_SEQUENCE, version, serial, _ED25519, name, validity, name, public, extensions)
    return _pem("CERTIFICATE", _der(_SEQUENCE, signed, _ED25519, _der(_BITS, b"\0", key.sign(signed).signature)))


def private_key(key: SigningKey) -> str:
    """The private key, as PEM (PKCS 8)."""
    return _pem("PRIVATE KEY", _der(_SEQUENCE, _der(_INTEGER, b"\0"), _ED25519, _der(_OCTETS, _der(_OCTETS, bytes(key)))))


def _time(at: datetime) -> bytes:
    """The year has two digits up to 2049 and four after that (RFC 5280, 4.1.2.5)."""
    if at.year < 2050:
        return _der(_UTC_TIME, f"{at:%y%m%d%H%M%SZ}".encode())
    return _der(_GENERALIZED_TIME, f"{at:%Y%m%d%H%M%SZ}".encode())


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size = len(body)
    if size < 128:
        return bytes([tag, size]) + body
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + body


def _pem(kind: str, der: bytes) -> str:
    lines = base64.encodebytes(der).decode().replace("\n", "")
    wrapped = "\n".join(lines[first : first + 64] for first in range(0, len(lines), 64))
    return f"-----BEGIN {kind}-----\n{wrapped}\n-----END {kind}-----\n"

"""The certificates of a swarm's NATS servers: a private authority, and one certificate for all
servers. Pure, except for the random numbers of new keys.

Keys use the elliptic curve P-256, because every TLS library supports it. The authority is valid for
ten years, because a new one must be given to every client; the servers' certificate for one year,
because a reload replaces it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LASTS = timedelta(days=3650)
SERVER_LASTS = timedelta(days=365)
RENEWED_WITHIN = timedelta(days=30)
"""A certificate with less time left is renewed by the next run."""
_CLOCK_SKEW = timedelta(hours=1)
_PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
_PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


class CertificateError(ValueError):
    """A certificate or its key cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """The fields of a certificate that matter here."""

    names: frozenset[str]
    """DNS names and addresses."""
    not_after: datetime
    public_key: bytes


def new_key() -> str:
    """A private key, as PEM (PKCS 8, not encrypted)."""
    return (
        ec.generate_private_key(ec.SECP256R1())
        .private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        .decode()
    )


def authority(key_pem: str, name: str, now: datetime) -> str:
    """A self-signed authority's certificate, as PEM."""
    key = _key(key_pem)
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(named, named, key.public_key(), now, AUTHORITY_LASTS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return _pem(builder.sign(key, hashes.SHA256()))


def server(key_pem: str, names: Sequence[str], authority_pem: str, authority_key_pem: str, now: datetime) -> str:
    """A certificate for `names` (DNS names and addresses), as PEM. Servers present it to clients
    and, on routes, to each other.

    Raises:
        CertificateError: a key or the authority cannot be read, or they do not belong together.
    """
    signer = _key(authority_key_pem)
    issuer = next(
        (each for each in _certificates(authority_pem) if _public(each.public_key()) == _public(signer.public_key())), None
    )
    if issuer is None:
        raise CertificateError("the authority's key does not match its certificate")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nats")])
    builder = _builder(subject, issuer.subject, _key(key_pem).public_key(), now, SERVER_LASTS)
    for extension in (
        x509.SubjectAlternativeName([_alternative(name) for name in names]),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    ):
        builder = builder.add_extension(extension, critical=False)
    return _pem(builder.sign(signer, hashes.SHA256()))


def read(pem: str) -> ServerCertificate:
    """The fields of the first certificate in `pem`. Raises CertificateError if there is none."""
    first = _certificates(pem)[0]
    try:
        found = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]
    except x509.ExtensionNotFound:
        names = []
    return ServerCertificate(frozenset(names), first.not_valid_after_utc.astimezone(UTC), _public(first.public_key()))


def belongs(key_pem: str, certificate_pem: str) -> bool:
    """Return whether the certificate matches this key. Raises CertificateError if either cannot be
    read.
    """
    return read(certificate_pem).public_key == _public(_key(key_pem).public_key())


def is_signed_by(certificate_pem: str, authorities_pem: str) -> bool:
    """Return whether one of the authorities signed the certificate directly, without an
    intermediate.
    """
    certificate = _certificates(certificate_pem)[0]
    return any(_issued(certificate, each) for each in _certificates(authorities_pem))


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # another name, another kind of key, or another signature
        return False
    return True


def _builder(subject: x509.Name, issuer: x509.Name, key: _PublicKey, now: datetime, lasts: timedelta) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lasts)
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key(pem: str) -> _PrivateKey:
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"it holds no PEM private key without a password ({error})") from None
    if not isinstance(key, _PrivateKey):
        raise CertificateError("its key is neither an elliptic-curve key nor an RSA key")
    return key


def _certificates(pem: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError:
        raise CertificateError("it holds no PEM certificate, which begins with -----BEGIN CERTIFICATE-----") from None


def _public(key: object) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined, no-any-return]


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()

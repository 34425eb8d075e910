"""Encrypts the chunks of a payload, so that they are unreadable until the message that refers to
them is stored.

It uses ChaCha20-Poly1305 (RFC 8439) with a separate key for each payload, so the nonce may be
constant. The seal consists of key and authenticator; the encrypted bytes have the payload's size.
It protects a payload only until its publisher releases the reference, not from those who read the
stream afterwards.
"""

from __future__ import annotations

from nacl.bindings import (
    crypto_aead_chacha20poly1305_ietf_ABYTES,
    crypto_aead_chacha20poly1305_ietf_decrypt,
    crypto_aead_chacha20poly1305_ietf_encrypt,
    crypto_aead_chacha20poly1305_ietf_KEYBYTES,
    crypto_aead_chacha20poly1305_ietf_NPUBBYTES,
)
from nacl.exceptions import CryptoError
from nacl.utils import random

_KEY_BYTES: int = crypto_aead_chacha20poly1305_ietf_KEYBYTES
_TAG_BYTES: int = crypto_aead_chacha20poly1305_ietf_ABYTES
_NONCE = bytes(crypto_aead_chacha20poly1305_ietf_NPUBBYTES)
SEAL_BYTES = _KEY_BYTES + _TAG_BYTES


def sealed(payload: bytes) -> tuple[bytes, bytes]:
    """The bytes to store, as many as the payload has, and the seal that decrypts them."""
    key = random(_KEY_BYTES)
    box = crypto_aead_chacha20poly1305_ietf_encrypt(payload, None, _NONCE, key)
    return box[:-_TAG_BYTES], key + box[-_TAG_BYTES:]


def opened(stored: bytes, seal: bytes) -> bytes | None:
    """The decrypted payload; None if the seal, of `SEAL_BYTES`, does not belong to these bytes."""
    try:
        return crypto_aead_chacha20poly1305_ietf_decrypt(stored + seal[_KEY_BYTES:], None, _NONCE, seal[:_KEY_BYTES])
    except CryptoError:
        return None

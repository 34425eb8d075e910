"""A node's Ed25519 key (nkey): create, load, sign, verify."""

from __future__ import annotations

import base64
import os
import secrets
import stat
from pathlib import Path

import nkeys
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from shared.atomic_files import create_once
from shared.plain_files import read_named
from shared.text import error_text

_USER_BYTE = nkeys.PREFIX_BYTE_USER
_MAX_BYTES = 4096
"""Of a key file. A seed has 58."""


class KeyFileError(Exception):
    """A key file cannot be used; the message says why and what to do."""


class SigningKey:
    """A private key in memory. Its public half is an nkey of type user (`U...`)."""

    def __init__(self, seed: bytes) -> None:
        """`seed` is an encoded nkey seed (`SU...`)."""
        self._pair = nkeys.from_seed(bytearray(seed))
        self.public_key: str = bytes(self._pair.public_key).decode()

    def sign(self, message: bytes) -> bytes:
        """Ed25519 signature, 64 bytes."""
        signature: bytes = self._pair.sign(message)
        return signature


def new_seed() -> bytes:
    """A fresh encoded seed (`SU...`)."""
    seed: bytes = bytes(nkeys.encode_seed(bytearray(secrets.token_bytes(32)), nkeys.PREFIX_BYTE_USER))
    return seed


def load_or_create(path: Path) -> SigningKey:
    """The key in `path`, created if there is none. Safe to call from several processes at once: all
    get the same key.

    Raises:
        KeyFileError: the file cannot be read or written, is readable for others, or holds no key.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            create_once(path, new_seed() + b"\n", mode=0o600)
    except OSError as error:
        raise KeyFileError(
            f"key file {path} cannot be made ({_cause(error)}): make its folder writable or set node.var_dir"
        ) from error
    return load(path)


def load(path: Path) -> SigningKey:
    """The key in `path`.

    Raises: KeyFileError: there is none, it cannot be read, it belongs to this user and is readable
    by others, or it holds no key.
    """
    try:
        state = path.stat()
        if stat.S_ISDIR(state.st_mode):
            raise KeyFileError(f"key file {path} is a folder: give the file in it")
        # As in ssh: a file owned by somebody else, such as a mounted secret, was given to this user
        # on purpose.
        if state.st_uid == os.geteuid() and state.st_mode & 0o077:
            raise KeyFileError(f"key file {path} is readable by other users: run `chmod 600 {path}`")
        seed = read_named(path, _MAX_BYTES).strip()
    except FileNotFoundError:
        raise KeyFileError(f"key file {path} does not exist: create one with `swarm keys new --out {path}`") from None
    except OSError as error:
        raise KeyFileError(
            f"key file {path} cannot be read ({error_text(error)}): correct the path, or let this user read it"
        ) from error
    try:
        key = SigningKey(seed)
    except Exception as error:
        raise KeyFileError(f"key file {path} holds no nkey seed ({type(error).__name__}): restore it or move it away") from None
    if not is_seed(seed.decode(errors="replace")):
        raise KeyFileError(f"key file {path} is damaged, as its checksum shows: restore it or move it away")
    return key


def create(path: Path, seed: bytes | None = None) -> SigningKey:
    """Store a new key, or the key of `seed`, in a new file that only its owner can read.

    Raises:
        KeyFileError: the file exists, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not create_once(path, (seed or new_seed()) + b"\n", mode=0o600):
            raise KeyFileError(f"key file {path} exists: a key is a node's identity, so it is not replaced; choose another file")
    except OSError as error:
        raise KeyFileError(
            f"key file {path} cannot be made ({_cause(error)}): make its folder writable, or choose another"
        ) from error
    return load(path)


def _cause(error: OSError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a part of its path is a file"
    return error_text(error)


def is_public_key(text: str) -> bool:
    """Check whether this is a well-formed public nkey of type user, checksum included."""
    return _decode_public(text) is not None


def is_seed(text: str) -> bool:
    """Check whether this is a well-formed seed of a user (`SU...`), checksum included; loading a
    seed does not check it.
    """
    try:
        decoded = base64.b32decode(text + "=" * (-len(text) % 8))
        nkeys.from_seed(bytearray(text.encode()))
    except Exception:  # nkeys raises its own errors and those of binascii and nacl
        return False
    return bool(nkeys.crc16(bytearray(decoded[:-2])) == int.from_bytes(decoded[-2:], "little"))


def verify(public_key: str, message: bytes, signature: bytes) -> bool:
    """Check whether `signature` over `message` is by the holder of `public_key`. False for anything
    malformed, never raises.
    """
    raw = _decode_public(public_key)
    if raw is None:
        return False
    try:
        VerifyKey(raw).verify(message, signature)
    except (BadSignatureError, ValueError, TypeError):
        return False
    return True


def _decode_public(public_key: str) -> bytes | None:
    if len(public_key) != 56 or not public_key.startswith("U"):
        return None
    try:
        decoded = base64.b32decode(public_key)
    except ValueError:
        return None
    raw, checksum = decoded[:-2], decoded[-2:]
    if raw[0] != _USER_BYTE or nkeys.crc16(bytearray(raw)) != int.from_bytes(checksum, "little"):
        return None
    return raw[1:]

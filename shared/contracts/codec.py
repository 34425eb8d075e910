"""Encodes messages to bytes and back, including their arrays of token ids and logprobs.

Messages are packed with `msgpack` and unpacked directly into structs by msgspec's typed decoder.
Unknown fields, missing fields, values out of range, over-long lengths, NaN and an unknown schema
version are refused before any other code sees them, in time that does not depend on what a hostile
sender put in.

Token arrays are raw little-endian bytes (`int32` ids, `float32` logprobs) because decoding a list
of a million Python integers costs far more than using it.
"""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
import msgspec

from shared.contracts.wire import Message, MessageError

MAX_LOGPROB = 1e-3
"""The largest log-probability accepted. It should be at most 0, but engines round."""
MAX_TOKENS = 1_048_576

M = TypeVar("M", bound=Message)
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Message) -> bytes:
    """Pack a message to MessagePack."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    return packed


def decode(payload: bytes, kind: type[M]) -> M:
    """Unpack and validate one message.

    Raises:
        MessageError: `schema_version` for a version this software does not know, `malformed` for
            everything else.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    try:
        message: M = decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError, OverflowError) as error:
        detail = str(error)[:200]
        if detail.endswith("$.schema`"):
            raise MessageError("schema_version", f"{kind.__name__}: {detail}: update the older node") from None
        raise MessageError("malformed", f"{kind.__name__}: {detail}") from None
    return message


def content_id(payload: bytes) -> str:
    """SHA-256 of the encoded bytes, in hex: a group's id and `Nats-Msg-Id`."""
    return hashlib.sha256(payload).hexdigest()


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids to little-endian int32 bytes."""
    return _little_endian(array("i", token_ids))


def unpack_ids(packed: bytes) -> list[int]:
    """Inverse of `pack_ids`. Raises MessageError (`malformed`) on a torn or negative array."""
    ids = _unpack("i", packed)
    if ids and min(ids) < 0:
        raise MessageError("malformed", "negative token id")
    return ids.tolist()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities to little-endian float32 bytes."""
    return _little_endian(array("f", logprobs))


def unpack_logprobs(packed: bytes) -> list[float]:
    """Inverse of `pack_logprobs`. Raises MessageError (`malformed`) on a torn array, NaN, or a
    value above 0 (rounding aside).
    """
    values = _unpack("f", packed).tolist()
    if any(math.isnan(v) or v > MAX_LOGPROB for v in values):
        raise MessageError("malformed", "a log-probability is NaN or positive")
    return values


def _unpack(typecode: str, packed: bytes) -> array[Any]:
    if len(packed) % 4:
        raise MessageError("malformed", f"array of {len(packed)} bytes is not a multiple of 4")
    values = array(typecode)
    values.frombytes(packed)
    return _swap_if_big_endian(values)


def _little_endian(values: array[Any]) -> bytes:
    return _swap_if_big_endian(values).tobytes()


def _swap_if_big_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values

"""Encodes messages to bytes and back, including their arrays of token ids and logprobs.

Messages are packed with `msgpack` and unpacked directly into structs by msgspec's typed decoder.
Missing fields, values out of range, over-long lengths, NaN and an unknown schema version are
refused before any other code sees them. Fields that this version does not know are ignored: a newer
node may have added them. They count in the message's size, and `decode_foreign` bounds what they
hold.

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
import zstandard

from shared.contracts.wire import Encoding, Message, MessageError

MAX_LOGPROB = 1e-3
"""The largest log-probability accepted. It should be at most 0, but engines round."""
MAX_TOKENS = 1_048_576
MAX_VALUES = 16_384
"""Most maps and lists, their entries and elements, in another node's message, unknown fields
included. A group of 1,024 completions has 9,300, and the longest prompt 4,400.
"""
MAX_DEPTH = 16
"""Deepest nesting of another node's message; this version's reaches 6."""
MALFORMED_TURNS = "turns: "
"""What is wrong with the ends of a completion's turns begins so: no version sends such ends."""
ZSTD_WINDOW_BYTES = 8 * 2**20
"""Most memory that unpacking a body takes besides its result."""
_ZSTD_LEVEL = 9
_FAST_ZSTD_LEVEL = 3
_FAST_FROM_BYTES = 2**20

M = TypeVar("M", bound=Message)
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}


class _Version(msgspec.Struct):
    """The schema version of any message, wherever the field stands in the map."""

    schema: int = 1


_version_decoder = msgspec.msgpack.Decoder(_Version)


def encode(message: Message) -> bytes:
    """Pack a message to MessagePack."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    return packed


def decode(payload: bytes, kind: type[M]) -> M:
    """Unpack and validate one message of this node's own processes.

    Raises:
        MessageError: `schema_version` for a version this software does not know, `out_of_range` for
            a value that it does not take and a later version may, `malformed` for everything else.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    try:
        message: M = decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError, OverflowError) as error:
        detail = f"{kind.__name__}: {str(error)[:200]}"
        version, known = _versions(payload, kind)
        if version is not None and version != known:
            # Another version may change any field, so the version alone says why it is unreadable.
            raise MessageError("schema_version", f"{detail}: update the older node") from None
        wrong_form = version is None or not _is_out_of_range(error)
        raise MessageError("malformed" if wrong_form else "out_of_range", detail) from None
    return message


def decode_foreign(payload: bytes, kind: type[M]) -> M:
    """Unpack and validate one message of another node. As `decode`, and no map has a key twice, so
    that no two programs read different values, and what unknown fields hold is bounded.

    Raises:
        MessageError: as `decode`.
    """
    message = decode(payload, kind)
    structure = _Structure()
    try:
        msgpack.unpackb(
            payload,
            raw=True,
            object_pairs_hook=structure.on_map,
            list_hook=structure.on_list,
            max_map_len=MAX_VALUES,
            max_array_len=MAX_VALUES,
            ext_hook=lambda code, data: None,
            timestamp=0,
        )
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise MessageError("malformed", f"{kind.__name__}: {str(error)[:200]}") from None
    return message


class _Depth(int):
    """The depth of a map or list, in whose place it stands. No unpacked value has this type."""


_DEPTHS = tuple(map(_Depth, range(MAX_DEPTH + 1)))


class _Structure:
    """Counts the values of a message and measures its depth while it is unpacked, from the inside
    out, so that no more than one path of it is kept.
    """

    def __init__(self) -> None:
        self._values = 0

    def on_map(self, pairs: list[tuple[object, object]]) -> _Depth:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a map has a key twice")
        return self._above([value for _, value in pairs])

    def on_list(self, values: list[object]) -> _Depth:
        return self._above(values)

    def _above(self, values: list[object]) -> _Depth:
        self._values += 1 + len(values)
        if self._values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        depth = 1 + max((value for value in values if type(value) is _Depth), default=0) if values else 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        return _DEPTHS[depth]


def _versions(payload: bytes, kind: type[Message]) -> tuple[int | None, int]:
    """The message's schema version (None: it cannot be read) and the one that this kind has here;
    equal if the kind has none of its own.
    """
    known = next((field.default for field in msgspec.structs.fields(kind) if field.name == "schema"), None)
    try:
        version = _version_decoder.decode(payload).schema
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return None, int(known or 0)
    return (version, int(known)) if known is not None else (0, 0)


def _is_out_of_range(error: Exception) -> bool:
    """Check whether a value has the right type, but is none that this version takes. msgspec has
    one error for both; its words differ.
    """
    wrong_form = (", got `", "missing required field", MALFORMED_TURNS)
    return isinstance(error, msgspec.ValidationError) and not any(words in str(error) for words in wrong_form)


def packed(body: bytes, encoding: Encoding) -> bytes:
    """The body of an envelope from the bytes of a group. The same bytes give the same body."""
    if encoding == "none":
        return body
    # A small body takes about a millisecond either way.
    level = _ZSTD_LEVEL if len(body) < _FAST_FROM_BYTES else _FAST_ZSTD_LEVEL
    return zstandard.ZstdCompressor(level=level, write_checksum=False).compress(body)


def unpacked(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """The bytes of a group from the body of an envelope.

    Raises:
        MessageError: `malformed` for a body that is not packed like this, `too_large` for one that
            unpacks to more than `most_bytes`.
    """
    if encoding == "none":
        return body
    # The size that a frame states is its sender's claim, so that no room is made for it.
    try:
        with zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).stream_reader(body) as reader:
            plain: bytes = reader.read(most_bytes + 1)
    except zstandard.ZstdError as error:
        raise MessageError("malformed", f"body: {str(error)[:200]}") from None
    if len(plain) > most_bytes:
        raise MessageError("too_large", f"the body unpacks to more than {most_bytes} bytes")
    return plain


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
    """Inverse of `pack_logprobs`. Raises MessageError (`malformed`) on a torn array, and on a value
    that is not finite or above 0 (rounding aside), as other nodes do.
    """
    values = _unpack("f", packed).tolist()
    if any(not math.isfinite(v) or v > MAX_LOGPROB for v in values):
        raise MessageError("malformed", "a log-probability is infinite, NaN or positive")
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

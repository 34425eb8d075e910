"""HighwayHash-64, with which a NATS server seals what it writes down of a stream.

As in J. Alakuijala, B. Cox and J. Wassenberg, "Fast keyed hash/pseudo-random function using SIMD
multiply and permute" (2016), and its portable C program. A kilobyte takes a millisecond.
"""

from __future__ import annotations

import struct

_MASK_32, _MASK_64 = 2**32 - 1, 2**64 - 1
_INIT_0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_INIT_1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)
_PACKET = 32


def highway_hash_64(key: bytes, message: bytes) -> bytes:
    """The eight bytes of the digest, as the server writes them. `key`: 32 bytes."""
    state = _State(key)
    whole = len(message) - len(message) % _PACKET
    for start in range(0, whole, _PACKET):
        state.take(message[start : start + _PACKET])
    if rest := message[whole:]:
        state.take_rest(rest)
    return state.digest()


class _State:
    """Four lists of four numbers of 64 bits."""

    def __init__(self, key: bytes) -> None:
        words = struct.unpack("<4Q", key)
        self._mul_0, self._mul_1 = list(_INIT_0), list(_INIT_1)
        self._v_0 = [init ^ word for init, word in zip(_INIT_0, words, strict=True)]
        self._v_1 = [init ^ _halves_swapped(word) for init, word in zip(_INIT_1, words, strict=True)]

    def take(self, packet: bytes) -> None:
        """Mix 32 bytes in."""
        v_0, v_1, mul_0, mul_1 = self._v_0, self._v_1, self._mul_0, self._mul_1
        for lane, word in enumerate(struct.unpack("<4Q", packet)):
            v_1[lane] = (v_1[lane] + mul_0[lane] + word) & _MASK_64
            mul_0[lane] ^= (v_1[lane] & _MASK_32) * (v_0[lane] >> 32)
            v_0[lane] = (v_0[lane] + mul_1[lane]) & _MASK_64
            mul_1[lane] ^= (v_0[lane] & _MASK_32) * (v_1[lane] >> 32)
        _add_zipped(v_1, v_0)
        _add_zipped(v_0, v_1)

    def take_rest(self, rest: bytes) -> None:
        """Mix the last 1 to 31 bytes in, and how many they are."""
        size = len(rest)
        self._v_0 = [(word + (size << 32) + size) & _MASK_64 for word in self._v_0]
        self._v_1 = [_turned(word >> 32, size) << 32 | _turned(word & _MASK_32, size) for word in self._v_1]
        fours = size & ~3
        packet, odd = bytearray(rest[:fours].ljust(_PACKET, b"\0")), rest[fours:]
        if size & 16:
            packet[28:] = rest[-4:]
        elif odd:
            packet[16:19] = bytes((odd[0], odd[len(odd) // 2], odd[-1]))
        self.take(bytes(packet))

    def digest(self) -> bytes:
        """Ends it: the state is of no use afterwards."""
        for _ in range(4):
            self.take(struct.pack("<4Q", *(_halves_swapped(self._v_0[lane]) for lane in (2, 3, 0, 1))))
        total = self._v_0[0] + self._v_1[0] + self._mul_0[0] + self._mul_1[0]
        return struct.pack("<Q", total & _MASK_64)


def _halves_swapped(word: int) -> int:
    return word >> 32 | (word & _MASK_32) << 32


def _turned(half: int, bits: int) -> int:
    return (half << bits | half >> (32 - bits)) & _MASK_32


_ZIPPED_LOW = (3, 12, 2, 5, 14, 1, 15, 0)
_ZIPPED_HIGH = (11, 4, 10, 13, 9, 6, 8, 7)


def _add_zipped(source: list[int], target: list[int]) -> None:
    """Add the bytes of each two words of `source`, in another order, to those of `target`."""
    for lane in (0, 2):
        of = struct.pack("<2Q", *source[lane : lane + 2])
        low, high = struct.unpack("<2Q", bytes(of[place] for place in (*_ZIPPED_LOW, *_ZIPPED_HIGH)))
        target[lane] = (target[lane] + low) & _MASK_64
        target[lane + 1] = (target[lane + 1] + high) & _MASK_64

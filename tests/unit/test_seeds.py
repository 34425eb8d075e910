"""Numbers and bytes from texts, against the published test vector of SHA-256 (FIPS 180-4), as
every node and restart must get the same.
"""

from __future__ import annotations

from shared.seeds import bytes_from, number_from


def test_the_first_bytes_of_sha_256_big_endian() -> None:
    assert number_from("abc", 4) == 0xBA7816BF
    assert number_from("abc") == 0xBA7816BF8F01CFEA
    assert number_from("abc", 32) == 0xBA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD
    assert bytes_from("abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

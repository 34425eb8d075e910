"""The digests that the algorithm's authors publish with their program (key 0, 1, ... 31; message
0, 1, ...), a length for each way through it.
"""

import pytest

from swarm_cli.looking.highway_hash import highway_hash_64

PUBLISHED = {0: 0x907A56DE22C26E53, 1: 0x7EAB43AAC7CDDD78, 2: 0xB8D0569AB0B53D62, 63: 0xAB8EEBE9BF2139A0}


@pytest.mark.parametrize(("length", "digest"), PUBLISHED.items())
def test_digests_are_the_published_ones(length: int, digest: int) -> None:
    assert highway_hash_64(bytes(range(32)), bytes(range(length))) == digest.to_bytes(8, "little")

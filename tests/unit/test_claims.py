"""Bounds on large foreign payloads in work, and on chunks that are referred to more than once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.verifier.fair_queue import SMALL_BYTES, ClaimedChunks, FairQueue, InFlightLimit
from shared.transport.base import BadReference
from shared.transport.blobs import MAX_CHUNKS, MIN_CHUNK_BYTES, SEAL_BYTES, Reference, most_chunks

MIB = 2**20


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20 * MIB), st.booleans()), max_size=80))
def test_what_is_in_work_stays_within_both_bounds_or_is_alone(steps: list[tuple[int, int, bool]]) -> None:
    in_flight = InFlightLimit(node_bytes=64 * MIB, sender_bytes=16 * MIB)
    working: list[tuple[str, int]] = []
    for number, size_bytes, ends in steps:
        if ends and working:
            in_flight.leave(*working.pop(0))
        sender = f"n{number}"
        if in_flight.fits()(sender, size_bytes):
            in_flight.take(sender, size_bytes)
            working.append((sender, size_bytes))
        large = [(name, size) for name, size in working if size > SMALL_BYTES]
        assert in_flight.total_bytes == sum(size for _, size in large)
        assert in_flight.total_bytes <= 64 * MIB or len(large) == 1
        for name in {name for name, _ in large}:
            sizes = [size for other, size in large if other == name]
            assert sum(sizes) <= 16 * MIB or len(sizes) == 1
    for each in working:
        in_flight.leave(*each)
    assert in_flight.total_bytes == 0


def test_a_large_group_is_not_passed_for_ever_by_smaller_ones_and_small_ones_never_wait() -> None:
    queue: FairQueue[int] = FairQueue(1e6, 1.0, 1.0, 0.0)
    in_flight = InFlightLimit(node_bytes=64 * MIB, sender_bytes=16 * MIB)
    working: list[tuple[str, int]] = []
    for number in range(400):
        queue.offer(f"hostile-{number % 8}", 2 * MIB, 2 * MIB, 0.0)
        while (found := queue.next(1.0, in_flight.fits())) is not None:
            in_flight.take(found[0], found[1])
            working.append(found)
    assert in_flight.total_bytes == 64 * MIB
    queue.offer("honest", 8 * MIB, 8 * MIB, 1.0)
    queue.offer("other", SMALL_BYTES, SMALL_BYTES, 1.0)
    assert queue.next(2.0, in_flight.fits()) == ("other", SMALL_BYTES)
    for _ in range(32):
        in_flight.leave(*working.pop(0))
        while (found := queue.next(2.0, in_flight.fits())) is not None:
            in_flight.take(found[0], found[1])
            working.append(found)
            if found[0] == "honest":
                return
    raise AssertionError("the large group of the honest sender was never started")


def test_a_chunk_belongs_to_the_first_message_of_its_sender_and_others_are_not_concerned() -> None:
    chunks = ClaimedChunks(capacity=4)
    assert chunks.claim("mallory", 1, (10, 11)) is None
    assert chunks.claim("mallory", 1, (10, 11)) is None, "the same message may be looked at again"
    assert chunks.claim("mallory", 2, (12, 11)) == 1
    assert chunks.claim("beta", 3, (10, 11)) is None, "who refers to another's chunks takes nothing from him"
    assert chunks.claim("mallory", 4, (12,)) is None
    assert chunks.claim("mallory", 5, (10,)) is None, "forgotten beyond the capacity"


@given(st.integers(0, 2**40), st.lists(st.integers(1, 10**17), min_size=1, max_size=200, unique=True))
def test_a_reference_comes_back_as_it_was_or_has_more_chunks_than_its_size_allows(size_bytes: int, chunks: list[int]) -> None:
    reference = Reference(size_bytes, "0" * 64, tuple(chunks), bytes(SEAL_BYTES))
    try:
        assert Reference.parse(reference.header()) == reference
        assert len(chunks) <= most_chunks(size_bytes)
    except BadReference:
        assert len(chunks) > most_chunks(size_bytes)
    assert most_chunks(size_bytes) <= min(MAX_CHUNKS, size_bytes // MIN_CHUNK_BYTES + 1)


@given(st.text(max_size=200) | st.from_regex(r"[0-9]{1,20} [0-9a-f]{64} [0-9,-]{0,60} (00){48}", fullmatch=True))
def test_any_header_is_a_reference_or_refused_and_never_costs_more_than_its_size(header: str) -> None:
    try:
        reference = Reference.parse(header)
    except BadReference:
        return
    assert len(reference.chunks) == len(set(reference.chunks)) <= most_chunks(reference.size_bytes)
    assert all(0 < chunk < 2**62 for chunk in reference.chunks)

"""The name of a group in logs: the same everywhere, and harmless whoever wrote the header."""

from __future__ import annotations

import pytest

from shared.contracts.codec import content_id
from shared.contracts.messages import ROLLOUT_ID_HEADER, claimed_rollout_id, rollout_id_of


def test_what_one_process_puts_into_the_header_another_reads_out_of_it():
    rollout_id = rollout_id_of(content_id(b"a group"))
    assert len(rollout_id) == 16 and content_id(b"a group").startswith(rollout_id)
    assert claimed_rollout_id({ROLLOUT_ID_HEADER: rollout_id}) == rollout_id


@pytest.mark.parametrize(
    "claim", ["", "0" * 15, "0" * 17, "0" * 16 + "\n", "ABCDEF0123456789", "\x1b[31m" + "0" * 11, "x" * 100_000, "０" * 16]
)
def test_a_header_that_is_no_rollout_id_never_reaches_a_log(claim: str):
    assert claimed_rollout_id({ROLLOUT_ID_HEADER: claim}) is None
    assert claimed_rollout_id({}) is None

"""`pytest test_change_due.py`, in the environment that the example is installed in."""

from __future__ import annotations

import re

import pytest
from swarm_example_task_source import ChangeDue


def test_settings_seed_and_index_decide_the_entry() -> None:
    assert ChangeDue({}, 1)[3] == ChangeDue({}, 1)[3]
    assert [ChangeDue({}, 1)[index] for index in range(20)] != [ChangeDue({}, 2)[index] for index in range(20)]


def test_the_reference_answer_is_right() -> None:
    source = ChangeDue({"most_cents": 50}, 7)
    for index in range(len(source)):
        price, paid = map(int, re.findall(r"\d+", source[index]["question"]))
        assert source[index]["answer"] == str(paid - price) and 0 < price < paid <= 50


@pytest.mark.parametrize("settings", [{"most_cent": 5}, {"most_cents": 10**9}])
def test_settings_that_a_peer_made_up_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        ChangeDue(settings, 1)

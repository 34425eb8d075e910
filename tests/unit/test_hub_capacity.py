"""The account's figures that an open hub, or a stranger who answers first, gives a newcomer."""

from __future__ import annotations

from typing import Any

import pytest

from shared.transport.base import TransportError
from swarm_cli.join.hub_capacity import _storage_of


@pytest.mark.parametrize(
    "figures",
    [
        {"limits": [1]},
        {"limits": {"max_storage": "much"}},
        {"limits": {"max_storage": -5}},
        {"storage": None},
        {"reserved_storage": 2**70},
    ],
)
def test_figures_in_no_servers_format_are_a_request_that_failed(figures: dict[str, Any]) -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        _storage_of(figures)


def test_an_account_without_a_limit_and_one_with() -> None:
    assert _storage_of({"limits": {"max_storage": -1}, "storage": 5, "reserved_storage": 7}) == (None, 7)
    assert _storage_of({"limits": {"max_storage": 100}, "storage": 5}) == (100, 5) and _storage_of({}) == (None, 0)

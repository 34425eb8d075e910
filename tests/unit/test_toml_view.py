"""Values as `swarm config show` prints them are TOML that reads as the same values."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from swarm_cli.toml_view import toml_value

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
VALUES = st.recursive(
    TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_a_value_reads_as_itself(value: object) -> None:
    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value

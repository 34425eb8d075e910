"""Imports without garbage collection."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.importing import without_collection

COUNTED = """
import gc
before = gc.get_stats()[2]["collections"]
{how}
print(gc.get_stats()[2]["collections"] - before, gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    if not enabled:
        gc.disable()


def test_nothing_is_collected_meanwhile_and_it_goes_on_afterwards_also_after_an_error() -> None:
    with pytest.raises(ImportError, match="gone"), without_collection():
        assert not gc.isenabled()
        raise ImportError("gone")
    assert gc.isenabled()


def test_what_was_off_before_stays_off() -> None:
    gc.disable()
    with without_collection(), without_collection():
        pass
    assert not gc.isenabled()


@pytest.mark.slow
def test_a_scorer_imports_everything_without_a_full_collection_and_later_ones_pass_over_it() -> None:
    how = "from shared.tasks.sandbox.worker import import_everything\nimport_everything(['reasoning_gym'], [], [])"
    done = subprocess.run([sys.executable, "-c", COUNTED.format(how=how)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "True", "True"]

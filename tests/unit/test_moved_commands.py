"""A command of an earlier version says what does the same now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_observe_says_that_status_looks_from_outside() -> None:
    done = forked.run("swarm_cli", ("observe", "nats://127.0.0.1:1"), environment=dict(os.environ), cwd=ROOT, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert "swarm status --url" in done.stderr and "--token" in done.stderr

"""Fixtures that several files of these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.page_looker import a_browser
from tests.nats_server import NatsServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with a_browser() as running:
        yield running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """An open server of this test's own."""
    running = NatsServer(tmp_path / "nats").start()
    yield running
    running.stop()

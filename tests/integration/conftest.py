"""Fixtures that several files of these tests share."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.page_looker import a_browser
from tests.integration.transport_planes import Body, Plane
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


@pytest.fixture
def over(nats_url: str) -> Callable[[Body], Awaitable[None]]:
    """Runs a test's body on a plane of its own."""
    tag = f"t{random.getrandbits(40):x}"

    async def run(body: Body) -> None:
        async with AsyncExitStack() as stack:
            await body(Plane(nats_url, tag, stack))

    return run

"""A generator whose engine's server is away waits for it; one with a wrong setting ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.generator.engine_calls import WAITING
from shared.runtime.exits import EXIT_CONFIG
from tests.engines.openai_server import Behaviour, openai_server
from tests.engines.served_node import ServedNode, served_node
from tests.nats_server import free_port


async def waits(node: ServedNode, *, tells: int) -> None:
    async def shown() -> bool:
        return await node.state() == WAITING and len(node.told("engine_away")) >= tells

    await node.until(shown)


async def makes_more(node: ServedNode) -> None:
    had = await node.groups()

    async def more() -> bool:
        return await node.groups() > had and await node.state() == "generating"

    await node.until(more)


@pytest.mark.slow
async def test_a_generator_waits_for_a_server_that_is_late_or_goes_away_and_goes_on(
    nats_url: str, model_folders: dict[bool, Path], tmp_path: Path
) -> None:
    port = free_port()
    async with served_node(nats_url, model_folders[True], f"http://127.0.0.1:{port}/v1", tmp_path) as node:
        await waits(node, tells=1)
        with openai_server(Behaviour(), port):
            await makes_more(node)
        await waits(node, tells=2)
        assert str(port) in node.told("engine_away")[1]["reason"]
        with openai_server(Behaviour(), port):
            await makes_more(node)
        assert not node.told("crashed")


@pytest.mark.slow
async def test_a_generator_that_waits_for_its_server_ends_when_it_is_told_to(
    nats_url: str, model_folders: dict[bool, Path], tmp_path: Path
) -> None:
    async with served_node(nats_url, model_folders[True], f"http://127.0.0.1:{free_port()}/v1", tmp_path) as node:
        await waits(node, tells=1)


@pytest.mark.slow
async def test_a_wrong_model_ends_with_78_and_a_sentence(nats_url: str, model_folders: dict[bool, Path], tmp_path: Path) -> None:
    with openai_server(Behaviour(models=("b",))) as url:
        async with served_node(nats_url, model_folders[True], url, tmp_path) as node:
            assert await asyncio.to_thread(node.process.wait, 120) == EXIT_CONFIG
            (told,) = node.told("cannot_go_on")
            assert "serves ['b'], not tiny" in told["reason"]

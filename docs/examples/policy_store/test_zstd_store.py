"""`pytest test_zstd_store.py`, in the environment that the example is installed in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from swarm_example_policy_store import ZstdStore

from shared.contracts.control import PolicyFile
from shared.policy_store.base import PolicyStoreError


async def published(store: ZstdStore, folder: Path, version: int, weights: bytes) -> PolicyFile:
    file = folder / "weights"
    file.write_bytes(weights)
    stored = await store.publish(file, version)
    return PolicyFile(version=version, sha256=stored.sha256, size_bytes=stored.size_bytes, uri=stored.uri)


def test_what_was_published_is_fetched_until_it_is_pruned(tmp_path: Path) -> None:
    async def scene() -> None:
        store = ZstdStore(tmp_path / "store", "alpha")
        first, second = [await published(store, tmp_path, version, bytes([version]) * 9000) for version in (1, 2)]
        assert (await store.fetch(first, tmp_path / "a")).read_bytes() == bytes([1]) * 9000
        await store.prune({2})
        assert (await store.fetch(second, tmp_path / "b")).read_bytes() == bytes([2]) * 9000
        with pytest.raises(PolicyStoreError):
            await store.fetch(first, tmp_path / "c")

    asyncio.run(scene())


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        store = ZstdStore(tmp_path / "store", "alpha")
        pointer = await published(store, tmp_path, 1, b"weights" * 1000)
        (file,) = (tmp_path / "store").glob("*.zst")
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(PolicyStoreError):
            await store.fetch(pointer, tmp_path / "a")

    asyncio.run(scene())

"""Policies that travel as what changed, on the trainer's side: when it publishes a full copy, what
it prunes, and what a restart, a full disk or a server that is away leaves.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.trainer.checkpoint import PolicyVersion
from services.trainer.step_publisher import Publisher
from shared.contracts.streams import ensure_node_streams
from shared.policy_store import PolicyStoreError, StoredPolicy, open_policy_store
from shared.policy_store.files import sha256_of
from shared.transport.base import TransportError
from tests.integration.policy_chains import KINDS, Swarm, stored_bytes, swarm


@pytest.mark.parametrize("kind", KINDS)
async def test_a_trainer_that_starts_again_publishes_a_full_copy(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with swarm(kind, tmp_path, nats_url) as alpha:
        for _ in range(3):
            newest, _ = await alpha.publish()
        await alpha.generator.fetch(newest, tmp_path / "cache")
        alpha.trainer = alpha.writer()
        newest, published = await alpha.publish()
        assert not newest.deltas
        assert (await alpha.generator.fetch(newest, tmp_path / "cache")).read_bytes() == published
        await alpha.trainer.prune([newest.version])
        newest, published = await alpha.publish()
        assert len(newest.deltas) == 1
        assert (await alpha.generator.fetch(newest, tmp_path / "cache")).read_bytes() == published


@pytest.mark.parametrize("kind", ["file", "nats"])
async def test_pruning_keeps_the_full_copy_and_the_deltas_that_a_kept_policy_needs_and_no_others(
    kind: str, tmp_path: Path, nats_url: str
) -> None:
    async with swarm(kind, tmp_path, nats_url, anchor_every=4) as alpha:
        sizes = []
        for version in range(1, 20):
            newest, published = await alpha.publish()
            await alpha.trainer.prune([version - 1, version])
            sizes.append(await stored_bytes(alpha))
        assert (await alpha.reader().fetch(newest, tmp_path / "cache")).read_bytes() == published
        assert max(sizes) < 2.7 * len(published), "two full copies and their deltas at most"
        assert min(sizes[4:]) < 2 * len(published)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_changed_wholly_travels_as_a_full_copy_and_is_not_tried_again_at_once(
    kind: str, tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    import shared.policy_store.chain as chain

    write_delta = chain.write_delta
    monkeypatch.setattr(chain, "write_delta", lambda *parts: tried.append(1) or write_delta(*parts))
    async with swarm(kind, tmp_path, nats_url, anchor_every=4) as alpha:
        for version in range(1, 11):
            alpha.weights = {name: torch.randn(value.shape).to(value.dtype) for name, value in alpha.weights.items()}
            newest, published = await alpha.publish()
            assert not newest.deltas
            assert (await alpha.generator.fetch(newest, tmp_path / "cache")).read_bytes() == published
            assert len(tried) == (0 if version < 2 else 1 if version < 7 else 2), version


@pytest.mark.parametrize("kind", KINDS)
async def test_a_policy_of_another_shape_travels_as_a_full_copy(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with swarm(kind, tmp_path, nats_url) as alpha:
        await alpha.publish()
        alpha.weights["c"] = torch.zeros(3)
        newest, published = await alpha.publish()
        assert not newest.deltas
        assert (await alpha.generator.fetch(newest, tmp_path / "cache")).read_bytes() == published


async def test_a_policy_that_could_not_be_published_is_followed_by_a_full_copy(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm("file", tmp_path, nats_url) as alpha:
        await alpha.publish()
        inner = alpha.trainer._store  # type: ignore[attr-defined]

        async def away(*_: object) -> StoredPolicy:
            raise PolicyStoreError("the volume is away")

        with monkeypatch.context() as broken:
            broken.setattr(inner, "publish", away)
            with pytest.raises(PolicyStoreError, match="the volume is away"):
                await alpha.publish()
        assert not list((tmp_path / "published").glob("*.delta"))
        newest, published = await alpha.publish()
        assert not newest.deltas
        assert (await alpha.generator.fetch(newest, tmp_path / "cache")).read_bytes() == published


async def test_a_volume_keeps_its_full_copies_though_the_trainer_overwrites_its_own(tmp_path: Path, nats_url: str) -> None:
    """The trainer's copy may be a second name of the volume's file; nothing writes into it."""
    async with swarm("file", tmp_path, nats_url) as alpha:
        newest, _ = await alpha.publish()
        for _ in range(3):
            await alpha.publish()
        assert sha256_of(tmp_path / "policies" / f"{newest.sha256}.safetensors") == newest.sha256


async def test_a_trainer_whose_disk_is_full_says_so_and_leaves_nothing(tmp_path: Path, nats_url: str) -> None:
    async with swarm("file", tmp_path, nats_url) as alpha:
        await alpha.publish()
        shutil.rmtree(tmp_path / "published")
        (tmp_path / "published").write_bytes(b"")
        with pytest.raises((PolicyStoreError, OSError)):
            await alpha.publish()
        os.unlink(tmp_path / "published")
        newest, published = await alpha.publish()
        assert not newest.deltas
        assert (await alpha.generator.fetch(newest, tmp_path / "cache")).read_bytes() == published


@pytest.mark.parametrize("kind", KINDS)
async def test_a_policy_that_is_not_announced_yet_is_not_pruned(kind: str, tmp_path: Path, nats_url: str) -> None:
    """Its pointer could not be written; the policies after it are deltas of it."""
    async with swarm(kind, tmp_path, nats_url, anchor_every=100) as alpha:
        for _ in range(3):
            await alpha.publish()
        alpha.trainer = alpha.writer()
        await alpha.publish()
        await alpha.trainer.prune([1, 2, 3])
        newest, published = await alpha.publish()
        await alpha.trainer.prune([newest.version])
        assert (await alpha.reader().fetch(newest, tmp_path / "cache")).read_bytes() == published


async def test_what_a_killed_writer_left_is_overwritten_and_a_killed_readers_draft_is_removed(
    tmp_path: Path, nats_url: str
) -> None:
    async with swarm("file", tmp_path, nats_url) as alpha:
        for _ in range(3):
            newest, _ = await alpha.publish()
        cache = tmp_path / "cache"
        await asyncio.to_thread(leave_drafts, cache)
        await alpha.generator.fetch(newest, cache)
        assert sorted(file.name for file in cache.glob(".draft-*")) == [".draft-young"]
        assert [file.name for file in (tmp_path / "published").iterdir()] == ["newest.safetensors"]


def leave_drafts(folder: Path) -> None:
    folder.mkdir()
    for name, age_s in ((".draft-old", 7200.0), (".draft-young", 10.0)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age_s,) * 2)


class Announcing:
    """A trainer's publisher on a node plane, its policies, and what a generator that
    joins gets.
    """

    def __init__(self, alpha: Swarm) -> None:
        self.alpha = alpha
        self.written = b""
        self.start()

    def start(self) -> None:
        transport = self.alpha.transport
        assert transport is not None
        staging = self.alpha.folder / "publishing"
        self.publisher = Publisher(self.alpha.writer(), transport, node=self.alpha.node, staging=staging, keep=2)

    async def publish(self, version: int) -> bytes:
        self.alpha.weights = {
            name: torch.where(torch.rand(value.shape) < 0.02, value * 1.01, value) for name, value in self.alpha.weights.items()
        }

        async def write(file: Path) -> None:
            save_file(self.alpha.weights, file)
            self.written = await asyncio.to_thread(file.read_bytes)

        position = PolicyVersion(batch_number=version, stream_seq=version, consumed_local=version)
        await self.publisher.publish(write, position)
        return self.written

    async def joined(self) -> bytes:
        assert self.publisher.pointer is not None
        cache = self.alpha.folder / secrets.token_hex(4)
        return (await self.alpha.reader().fetch(self.publisher.pointer, cache)).read_bytes()


@asynccontextmanager
async def announcing(folder: Path, nats_url: str) -> AsyncIterator[Announcing]:
    async with swarm("nats", folder, nats_url, anchor_every=100) as alpha:
        assert alpha.transport is not None
        await ensure_node_streams(alpha.transport, alpha.node)
        yield Announcing(alpha)


async def test_a_trainer_that_starts_again_prunes_nothing_that_the_pointer_needs(tmp_path: Path, nats_url: str) -> None:
    async with announcing(tmp_path, nats_url) as alpha:
        for version in range(1, 8):
            published = await alpha.publish(version)
            await alpha.publisher.prune()
        alpha.start()
        await alpha.publisher.read_pointer()
        await alpha.publisher.prune()
        assert await alpha.joined() == published


async def test_a_pointer_that_could_not_be_written_is_tried_again_without_storing_again(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with announcing(tmp_path, nats_url) as alpha:
        for version in range(1, 4):
            await alpha.publish(version)
        alpha.start()
        await alpha.publisher.read_pointer()
        transport = alpha.alpha.transport
        assert transport is not None

        async def away(*_: object, **__: object) -> int:
            raise TransportError("the server is away")

        stored = []
        for _ in range(4):
            with monkeypatch.context() as broken:
                broken.setattr(transport.kv, "put", away)
                with pytest.raises(TransportError):
                    await alpha.publish(4)
            await alpha.publisher.prune()
            stored.append(await stored_bytes(alpha.alpha))
        assert stored[-1] == stored[0], "one copy, however often it is tried"
        assert await alpha.publish(4) == await alpha.joined()
        published = await alpha.publish(5)
        await alpha.publisher.prune()
        assert await alpha.joined() == published


async def test_a_trainer_that_was_suspended_prunes_nothing_that_its_successor_published(tmp_path: Path, nats_url: str) -> None:
    """A volume knows no lease: the successor's policies are none that the former trainer needs."""
    async with announcing(tmp_path, nats_url) as alpha:
        transport, staging = alpha.alpha.transport, alpha.alpha.folder / "publishing"
        assert transport is not None
        stores = [open_policy_store(f"file://{tmp_path}/shared", None, alpha.alpha.node) for _ in range(2)]
        former, successor = (Publisher(store, transport, node=alpha.alpha.node, staging=staging, keep=2) for store in stores)

        async def write(file: Path) -> None:
            save_file(alpha.alpha.weights, file)

        def trained(version: int) -> PolicyVersion:
            return PolicyVersion(batch_number=version, stream_seq=version, consumed_local=version)

        await former.publish(write, trained(1))
        await successor.read_pointer()
        alpha.alpha.weights = {name: value + 1 for name, value in alpha.alpha.weights.items()}
        await successor.publish(write, trained(2))
        await former.prune()
        assert successor.pointer is not None
        await stores[1].fetch(successor.pointer, tmp_path / "cache")
        await successor.prune()
        await stores[1].fetch(successor.pointer, tmp_path / "cache")

"""Policies that travel as what changed: the same bytes as full copies, whatever a reader has,
misses or finds damaged.
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
from msgspec import structs
from safetensors.torch import save_file

from services.trainer.durable.publish import Publisher
from services.trainer.state import TrainedPosition
from shared.contracts.codec import decode, encode
from shared.contracts.control import PolicyPointer
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_policies_stream
from shared.policy_store import PolicyStore, PolicyStoreError, StoredPolicy, open_policy_store
from shared.policy_store.files import sha256_of
from shared.transport.base import Transport, TransportError
from shared.transport.connect import connect

KINDS = ["file", "nats", "memory"]


class Swarm:
    """A trainer's store and those of its generators, on the same volume or server."""

    def __init__(self, kind: str, folder: Path, transport: Transport | None, node: str, anchor_every: int) -> None:
        self.kind, self.folder, self.transport, self.node, self.anchor_every = kind, folder, transport, node, anchor_every
        self.trainer = self.writer()
        self.generator = self.reader()
        self.weights = {"a": torch.randn(90_000).mul(0.02).bfloat16(), "b": torch.randn(300, 40)}
        self.version = 0

    def _open(self, **settings: object) -> PolicyStore:
        uri = (self.folder / "policies").as_uri() if self.kind == "file" else "nats://"
        return open_policy_store(uri, self.transport, self.node, **settings)  # type: ignore[arg-type]

    def writer(self) -> PolicyStore:
        return self._open(scratch=self.folder / "published", anchor_every=self.anchor_every)

    def reader(self) -> PolicyStore:
        return self._open()

    async def publish(self, part: float = 0.02) -> tuple[PolicyPointer, bytes]:
        """Train a little, publish, delete the file as the publisher does; the pointer goes through
        its message.
        """
        self.version += 1
        self.weights = {
            name: torch.where(torch.rand(value.shape) < part, value * 1.01, value) for name, value in self.weights.items()
        }
        file = self.folder / f"{self.version}.safetensors"
        save_file(self.weights, file)
        published = file.read_bytes()
        stored = await self.trainer.publish(file, self.version)
        file.unlink(missing_ok=True)
        return pointer(stored, self.version), published


def pointer(stored: StoredPolicy, version: int) -> PolicyPointer:
    made = PolicyPointer(
        version=version,
        sha256=stored.sha256,
        size_bytes=stored.size_bytes,
        uri=stored.uri,
        consumed_local=0,
        created_at=1.0,
        anchor=stored.anchor,
        deltas=list(stored.deltas),
    )
    assert decode(encode(made), PolicyPointer) == made
    return made


@asynccontextmanager
async def swarm(kind: str, folder: Path, nats_url: str, anchor_every: int = 5) -> AsyncIterator[Swarm]:
    node = f"c{secrets.token_hex(4)}"
    transport = None if kind == "file" else await connect(nats_url if kind == "nats" else f"memory://{node}", name=node)
    try:
        yield Swarm(kind, folder, transport, node, anchor_every)
    finally:
        if transport is not None:
            await transport.close()


def left_over(folder: Path) -> list[Path]:
    return [*folder.rglob("deltas"), *folder.rglob(".draft-*")]


def forget_others(folder: Path, keep: Path) -> None:
    """As the generator does when it has loaded a policy."""
    for file in folder.glob("*.safetensors"):
        if file != keep:
            file.unlink()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_follower_and_one_who_joins_at_any_time_get_the_very_bytes(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with swarm(kind, tmp_path, nats_url) as alpha:
        deltas = []
        for version in range(1, 13):
            newest, published = await alpha.publish()
            deltas.append(len(newest.deltas))
            followed = await alpha.generator.fetch(newest, tmp_path / "follower")
            assert followed.read_bytes() == published
            assert followed.name == f"{newest.sha256}.safetensors"
            forget_others(tmp_path / "follower", followed)
            joined = await alpha.reader().fetch(newest, tmp_path / f"joined-{version}")
            assert joined.read_bytes() == published
            assert not left_over(tmp_path)
            await alpha.trainer.prune(range(version - 1, version + 1))
        assert deltas == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1], "a full copy every five policies"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_delta_is_a_small_part_of_what_is_published(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with swarm(kind, tmp_path, nats_url) as alpha:
        await alpha.publish()
        newest, published = await alpha.publish(part=0.01)
        assert newest.size_bytes == len(published)
        assert newest.deltas[0].file.size_bytes < len(published) / 20


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reader_that_missed_some_policies_fetches_what_it_lacks(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with swarm(kind, tmp_path, nats_url, anchor_every=100) as alpha:
        published = b""
        for version in range(1, 10):
            newest, published = await alpha.publish()
            if version in (1, 2, 5, 9):
                fetched = await alpha.generator.fetch(newest, tmp_path / "cache")
                assert fetched.read_bytes() == published
                forget_others(tmp_path / "cache", fetched)
            await alpha.trainer.prune([version])


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_reader_holds_may_be_damaged_and_it_begins_with_the_full_copy(
    kind: str, tmp_path: Path, nats_url: str
) -> None:
    async with swarm(kind, tmp_path, nats_url) as alpha:
        for _ in range(3):
            newest, _ = await alpha.publish()
            held = await alpha.generator.fetch(newest, tmp_path / "cache")
        damage(held)
        newest, published = await alpha.publish()
        fetched = await alpha.generator.fetch(newest, tmp_path / "cache")
        assert fetched.read_bytes() == published
        damage(fetched)
        assert (await alpha.generator.fetch(newest, tmp_path / "cache")).read_bytes() == published, "and the newest one itself"


def damage(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 0xFF
    file.unlink()  # a volume's file may be the same one under another name
    file.write_bytes(contents)


@pytest.mark.parametrize("kind", ["file", "nats"])
async def test_a_delta_that_is_gone_or_damaged_is_refused_until_the_next_full_copy(
    kind: str, tmp_path: Path, nats_url: str
) -> None:
    async with swarm(kind, tmp_path, nats_url, anchor_every=4) as alpha:
        first, _ = await alpha.publish()
        held = await alpha.generator.fetch(first, tmp_path / "cache")
        second, _ = await alpha.publish()
        if kind == "file":
            damage(tmp_path / "policies" / f"{second.deltas[0].file.sha256}.safetensors")
        else:
            assert alpha.transport is not None
            position = second.deltas[0].file.uri.rpartition("=")[2]
            await alpha.transport.delete(node_policies_stream(alpha.node), int(position))
        for version in (2, 3, 4):
            newest = second if version == 2 else (await alpha.publish())[0]
            with pytest.raises(PolicyStoreError, match=rf"policy {alpha.node}@2: .*the trainer is asked"):
                await alpha.generator.fetch(newest, tmp_path / "cache")
        if kind == "nats":
            assert held.exists(), "the old policy stays"
        newest, published = await alpha.publish()
        assert (await alpha.generator.fetch(newest, tmp_path / "cache")).read_bytes() == published


@pytest.mark.parametrize("kind", KINDS)
async def test_a_delta_for_another_base_is_refused_and_one_applied_twice_too(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with swarm(kind, tmp_path, nats_url, anchor_every=100) as alpha:
        await alpha.publish()
        await alpha.publish()
        newest, _ = await alpha.publish()
        one, two = newest.deltas
        for deltas in ([two], [two, one], [one, one], [one, two, two]):
            wrong = structs.replace(newest, deltas=deltas)
            with pytest.raises(PolicyStoreError, match=r"is for another base, [0-9a-f]{12}\.\. instead of [0-9a-f]{12}\.\."):
                await alpha.reader().fetch(wrong, tmp_path / secrets.token_hex(4))
        other = structs.replace(newest, sha256="0" * 64)
        with pytest.raises(PolicyStoreError, match=r"sha256 mismatch \(expected 000000000000\.\., got .*a full copy is requested"):
            await alpha.reader().fetch(other, tmp_path / "cache")


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


async def stored_bytes(alpha: Swarm) -> int:
    if alpha.transport is None:
        return sum(file.stat().st_size for file in (alpha.folder / "policies").iterdir())
    return (await alpha.transport.stream_state(node_policies_stream(alpha.node))).size_bytes


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


async def test_a_base_is_kept_when_the_store_does_not_answer(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm("nats", tmp_path, nats_url) as alpha:
        for _ in range(2):
            newest, _ = await alpha.publish()
            held = await alpha.generator.fetch(newest, tmp_path / "cache")
        newest, published = await alpha.publish()
        inner = alpha.generator._store  # type: ignore[attr-defined]

        async def away(*_: object) -> Path:
            raise PolicyStoreError("the server is away")

        with monkeypatch.context() as broken:
            broken.setattr(inner, "fetch", away)
            with pytest.raises(PolicyStoreError, match="the server is away"):
                await alpha.generator.fetch(newest, tmp_path / "cache")
        assert held.exists()
        assert (await alpha.generator.fetch(newest, tmp_path / "cache")).read_bytes() == published


@pytest.mark.parametrize("kind", ["file", "nats"])
async def test_a_reader_that_never_loads_what_it_fetches_does_not_fill_its_disk(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with swarm(kind, tmp_path, nats_url, anchor_every=100) as alpha:
        for _ in range(8):
            newest, _ = await alpha.publish()
            await alpha.generator.fetch(newest, tmp_path / "cache")
        assert held_in(tmp_path / "cache") <= 2


def held_in(folder: Path) -> int:
    return len(list(folder.iterdir()))


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
    """A trainer's publisher on a node plane in memory, its policies, and what a generator that
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

        position = TrainedPosition(batch_number=version, stream_seq=version, consumed_local=version)
        await self.publisher.publish(write, position)
        return self.written

    async def joined(self) -> bytes:
        assert self.publisher.pointer is not None
        cache = self.alpha.folder / secrets.token_hex(4)
        return (await self.alpha.reader().fetch(self.publisher.pointer, cache)).read_bytes()


@asynccontextmanager
async def announcing(folder: Path, nats_url: str) -> AsyncIterator[Announcing]:
    async with swarm("memory", folder, nats_url, anchor_every=100) as alpha:
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

        def trained(version: int) -> TrainedPosition:
            return TrainedPosition(batch_number=version, stream_seq=version, consumed_local=version)

        await former.publish(write, trained(1))
        await successor.read_pointer()
        alpha.alpha.weights = {name: value + 1 for name, value in alpha.alpha.weights.items()}
        await successor.publish(write, trained(2))
        await former.prune()
        assert successor.pointer is not None
        await stores[1].fetch(successor.pointer, tmp_path / "cache")
        await successor.prune()
        await stores[1].fetch(successor.pointer, tmp_path / "cache")

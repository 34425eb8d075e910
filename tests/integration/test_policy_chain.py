"""Policies that travel as what changed, on the reader's side: the same bytes as full copies,
whatever a reader has, misses or finds damaged.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from msgspec import structs

from shared.contracts.subjects import node_policies_stream
from shared.policy_store import PolicyStoreError
from tests.integration.policy_chains import KINDS, swarm
from tests.nats_server import delete_message


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
            await delete_message(alpha.transport, node_policies_stream(alpha.node), int(position))
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

"""Both policy stores keep the same promises: a volume and JetStream."""

from __future__ import annotations

import asyncio
import filecmp
import os
import resource
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.contracts.control import PolicyPointer
from shared.contracts.streams import ensure_node_bucket
from shared.contracts.subjects import node_policies_stream
from shared.policy_store import PolicyStore, PolicyStoreError, StoredPolicy, open_policy_store
from shared.policy_store.files import cause_of, copy_hashing
from shared.policy_store.jetstream import CHUNK_BYTES
from shared.transport.base import Lowering, Transport
from shared.transport.connect import connect
from tests.nats_server import delete_message

KINDS = ["file", "nats"]
SIZE = 3 * CHUNK_BYTES + 12_345


@asynccontextmanager
async def a_store(kind: str, folder: Path, nats_url: str) -> AsyncIterator[tuple[PolicyStore, Transport | None, str]]:
    node = f"p{secrets.token_hex(4)}"
    if kind == "file":
        yield open_policy_store((folder / "policies").as_uri(), None, node), None, node
        return
    transport = await connect(nats_url, name=node)
    await ensure_node_bucket(transport, node, 1, Lowering.KEEP)
    try:
        yield open_policy_store("nats://", transport, node), transport, node
    finally:
        await transport.close()


def weights(folder: Path, seed: int, size_bytes: int = SIZE) -> Path:
    file = folder / f"weights-{seed}"
    file.write_bytes(seed.to_bytes(8, "big") + os.urandom(size_bytes - 8))
    return file


def pointer(stored: StoredPolicy, version: int) -> PolicyPointer:
    return PolicyPointer(
        version=version,
        sha256=stored.sha256,
        size_bytes=stored.size_bytes,
        uri=stored.uri,
        consumed_local=0,
        created_at=0.0,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size_bytes", [9, CHUNK_BYTES, SIZE, 40 * CHUNK_BYTES])
async def test_what_is_fetched_is_what_was_published(kind: str, size_bytes: int, tmp_path: Path, nats_url: str) -> None:
    async with a_store(kind, tmp_path, nats_url) as (store, _, _):
        file = weights(tmp_path, 1, size_bytes)
        published = file.read_bytes()
        stored = await store.publish(file, 1)
        fetched = await store.fetch(pointer(stored, 1), tmp_path / "cache")
        assert fetched.read_bytes() == published
        assert fetched.name == f"{stored.sha256}.safetensors"
        assert stored.size_bytes == size_bytes


@pytest.mark.parametrize("kind", KINDS)
async def test_pruning_forgets_all_versions_but_the_ones_to_keep(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with a_store(kind, tmp_path, nats_url) as (store, _, _):
        files = {version: weights(tmp_path, version) for version in range(6)}
        published = {version: file.read_bytes() for version, file in files.items()}
        stored = {version: await store.publish(file, version) for version, file in files.items()}
        await store.prune([1, 4, 5])
        for version in (1, 4, 5):
            cache = tmp_path / f"cache-{version}"
            fetched = await store.fetch(pointer(stored[version], version), cache)
            assert fetched.read_bytes() == published[version]
        for version in (0, 2, 3) if kind == "file" else (0,):  # a stream is cut off at its oldest kept policy
            with pytest.raises(PolicyStoreError, match=rf"@{version}: .*the trainer is asked to publish it again"):
                await store.fetch(pointer(stored[version], version), tmp_path / f"cache-{version}")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_version_with_the_same_bytes_as_a_pruned_one_stays(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with a_store(kind, tmp_path, nats_url) as (store, _, _):
        file = weights(tmp_path, 1)
        published = file.read_bytes()
        await store.publish(file, 1)
        file.write_bytes(published)
        second = await store.publish(file, 2)
        await store.prune([2])
        assert (await store.fetch(pointer(second, 2), tmp_path / "cache")).read_bytes() == published


@pytest.mark.parametrize("kind", ["file", "nats"])
async def test_a_restarted_trainer_prunes_what_an_earlier_one_published(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with a_store(kind, tmp_path, nats_url) as (store, transport, node):
        stored = [await store.publish(weights(tmp_path, version), version) for version in (1, 2)]
        again = open_policy_store((tmp_path / "policies").as_uri() if kind == "file" else "nats://", transport, node)
        await again.prune({2})
        await store.fetch(pointer(stored[1], 2), tmp_path / "cache")
        newest = await again.publish(weights(tmp_path, 3), 3)
        await again.prune({3})
        for version in (1, 2):
            with pytest.raises(PolicyStoreError):
                await store.fetch(pointer(stored[version - 1], version), tmp_path / f"cache-{version}")
        await store.fetch(pointer(newest, 3), tmp_path / "cache")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pointer_to_other_bytes_is_refused_with_both_hashes(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with a_store(kind, tmp_path, nats_url) as (store, _, node):
        stored = await store.publish(weights(tmp_path, 1), 41)
        if kind == "file":
            file = await store.fetch(pointer(stored, 41), tmp_path)
            with file.open("r+b") as stream:
                stream.seek(1000)
                stream.write(b"\x00" * 64)
            wanted = stored
        else:
            wanted = stored._replace(sha256="0" * 64)
        with pytest.raises(PolicyStoreError, match=rf"policy {node}@41: sha256 mismatch \(expected {wanted.sha256[:12]}\.\., got "):
            await store.fetch(pointer(wanted, 41), tmp_path / "cache")
        assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("kind", ["file", "nats"])
async def test_a_truncated_policy_is_refused_with_both_sizes(kind: str, tmp_path: Path, nats_url: str) -> None:
    async with a_store(kind, tmp_path, nats_url) as (store, transport, node):
        stored = await store.publish(weights(tmp_path, 1), 41)
        if kind == "file":
            os.truncate(await store.fetch(pointer(stored, 41), tmp_path), 1000)
        else:
            assert transport is not None
            await delete_message(transport, node_policies_stream(node), 4)
        with pytest.raises(PolicyStoreError, match=rf"policy {node}@41: truncated or overwritten: expected {SIZE} bytes"):
            await store.fetch(pointer(stored, 41), tmp_path / "cache")


async def test_a_file_on_another_volume_is_copied(tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two volumes are not to be had everywhere; only the answer to whether there are two is made up.
    monkeypatch.setattr("shared.policy_store.volume.same_volume", lambda file, folder: False)
    async with a_store("file", tmp_path, nats_url) as (store, _, _):
        file = weights(tmp_path, 1)
        stored = await store.publish(file, 1)
        assert (await store.fetch(pointer(stored, 1), tmp_path)).read_bytes() == file.read_bytes()


@pytest.fixture
def policies_on_a_mount(tmp_path: Path) -> Iterator[Path]:
    """The store's folder, mounted from the same disk: one device number, and nothing can be renamed
    into it from beside it.
    """
    (mounted := tmp_path / "policies").mkdir()
    (beneath := tmp_path / "beneath").mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "--bind", beneath, mounted], capture_output=True, check=False).returncode:
        pytest.skip("a folder cannot be mounted a second time here: run as root")
    yield mounted
    subprocess.run(["umount", mounted], check=True)


async def test_a_file_on_another_mount_of_the_same_disk_is_copied(policies_on_a_mount: Path, tmp_path: Path, nats_url: str) -> None:
    async with a_store("file", tmp_path, nats_url) as (store, _, _):
        file = weights(tmp_path, 1)
        content = file.read_bytes()
        stored = await store.publish(file, 1)
        assert (await store.fetch(pointer(stored, 1), tmp_path)).read_bytes() == content
        assert list(policies_on_a_mount.glob(".*")) == []  # noqa: ASYNC240


async def test_a_write_that_breaks_off_is_named_and_leaves_nothing_behind(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.policy_store.volume.same_volume", lambda file, folder: False)
    async with a_store("file", tmp_path, nats_url) as (store, _, _):
        file = weights(tmp_path, 1)
        stored = await store.publish(file, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(PolicyStoreError, match=r"@2: not published: .*policies"):
                await store.publish(file, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(list((tmp_path / "policies").iterdir())) == 2
        await store.fetch(pointer(stored, 1), tmp_path)


def test_a_full_disk_is_named_with_a_remedy(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError) as error:
        copy_hashing(weights(tmp_path, 1), full.write)
    assert cause_of(error.value, tmp_path) == f"no space left for {tmp_path}: free some, or move policy_store.uri"


async def test_a_file_that_is_not_there_is_not_published(tmp_path: Path, nats_url: str) -> None:
    for kind in KINDS:
        async with a_store(kind, tmp_path, nats_url) as (store, _, _):
            with pytest.raises(PolicyStoreError, match="not published"):
                await store.publish(tmp_path / "absent", 1)


async def test_a_download_that_is_there_already_is_used_only_if_it_is_whole(tmp_path: Path, nats_url: str) -> None:
    async with a_store("nats", tmp_path, nats_url) as (store, transport, node):
        file = weights(tmp_path, 1)
        stored = await store.publish(file, 1)
        fetched = await store.fetch(pointer(stored, 1), tmp_path / "cache")
        fetched.write_bytes(b"torn")
        assert (await store.fetch(pointer(stored, 1), tmp_path / "cache")).read_bytes() == file.read_bytes()
        assert transport is not None
        await transport.purge(node_policies_stream(node), 10_000)
        assert (await store.fetch(pointer(stored, 1), tmp_path / "cache")).read_bytes() == file.read_bytes()


async def test_a_generator_keeps_the_newest_two_downloads(tmp_path: Path, nats_url: str) -> None:
    async with a_store("nats", tmp_path, nats_url) as (store, _, _):
        cache = tmp_path / "cache"
        fetched = []
        for version in range(4):
            stored = await store.publish(weights(tmp_path, version), version)
            fetched.append(await store.fetch(pointer(stored, version), cache))
            os.utime(fetched[-1], (version + 1, version + 1))
        assert sorted(cache.iterdir()) == sorted(fetched[-2:])


async def test_readers_fetch_while_the_trainer_publishes_and_prunes(tmp_path: Path, nats_url: str) -> None:
    async with a_store("nats", tmp_path, nats_url) as (store, _, _):
        newest: list[PolicyPointer] = []
        fetched = 0

        async def read(number: int) -> None:
            nonlocal fetched
            while not newest or newest[-1].version < 11:
                if newest:
                    await store.fetch(newest[-1], tmp_path / f"cache-{number}")
                    fetched += 1
                await asyncio.sleep(0.005)

        readers = [asyncio.create_task(read(number)) for number in range(3)]
        for version in range(12):
            stored = await store.publish(weights(tmp_path, version), version)
            newest.append(pointer(stored, version))
            await asyncio.sleep(0.02)
            await store.prune({version, version - 1, version - 2})
        await asyncio.gather(*readers)
        assert fetched > 12


async def test_64_mib_travel_through_jetstream(tmp_path: Path, nats_url: str) -> None:
    """How fast is the benchmark `policy-60mb`'s question."""
    async with a_store("nats", tmp_path, nats_url) as (store, _, _):
        written = weights(tmp_path, 1, 64 * 2**20)
        stored = await store.publish(written, 1)
        fetched = await store.fetch(pointer(stored, 1), tmp_path / "cache")
        assert filecmp.cmp(written, fetched, shallow=False)
        await store.prune(())


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("s3://bucket", "no policy store is called 's3'"),
        ("file://host/folder", "three slashes"),
        ("nats://server:4222", "the URI must not name a server"),
        ("nats://", "not connected to the node plane"),
        ("policies", "has no scheme"),
    ],
)
def test_a_uri_that_names_no_store_is_refused_with_a_remedy(uri: str, problem: str) -> None:
    with pytest.raises(PolicyStoreError, match=rf"{problem}.*set policy_store.uri to"):
        open_policy_store(uri, None, "alpha")

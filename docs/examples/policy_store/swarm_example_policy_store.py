"""Stores policies compressed in a shared folder: `policy_store.uri = "zstd:///mnt/policies"`."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from urllib.parse import unquote, urlsplit

import zstandard

from shared.contracts.control import PolicyFile, PolicyPointer
from shared.policy_store.base import PolicyStoreError, StoredPolicy, StorePlace, policy_label, wrong_hash


class ZstdStore:
    """One node's policies in `folder`, a compressed file for each."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder, self._node = folder, node

    async def publish(self, weights_file: Path, version: int) -> StoredPolicy:
        weights = await asyncio.to_thread(weights_file.read_bytes)
        sha256 = hashlib.sha256(weights).hexdigest()
        file = self._folder / f"{self._node}.{version}.{sha256}.zst"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".part").write_bytes(await asyncio.to_thread(zstandard.compress, weights))
            os.replace(file.with_suffix(".part"), file)  # readers see the whole file or none
        except OSError as error:
            raise PolicyStoreError(f"{policy_label(self._node, version)}: {error}") from error
        return StoredPolicy(sha256, len(weights), file.as_uri())

    def begin_again(self) -> None:
        """Nothing to do, because every policy is stored in full."""

    async def fetch(self, pointer: PolicyPointer | PolicyFile, into: Path) -> Path:
        label = policy_label(self._node, pointer.version)
        try:
            packed = (self._folder / f"{self._node}.{pointer.version}.{pointer.sha256}.zst").read_bytes()
            weights = await asyncio.to_thread(zstandard.decompress, packed, max_output_size=pointer.size_bytes)
            os.makedirs(into, exist_ok=True)
            (into / "policy.safetensors").write_bytes(weights)
        except (OSError, zstandard.ZstdError) as error:
            raise PolicyStoreError(f"{label}: {error}") from error
        if (found := hashlib.sha256(weights).hexdigest()) != pointer.sha256:
            raise wrong_hash(label, str(self._folder), pointer.sha256, found)
        return into / "policy.safetensors"

    async def prune(self, keep: Collection[int]) -> None:
        for file in self._folder.glob(f"{self._node}.*.zst"):
            if int(file.name.split(".")[1]) not in keep:
                file.unlink(missing_ok=True)


def open_store(place: StorePlace) -> ZstdStore:
    """The store of a node, in the folder that `policy_store.uri` names."""
    return ZstdStore(Path(unquote(urlsplit(place.uri).path)), place.node)

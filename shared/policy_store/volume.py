"""`file://`: policies in a folder that trainer and generators share.

    <sha256>.safetensors         the weights
    v<version>.<sha256>.version  empty; its name says that this version consists of that file

Both appear by rename or creation, so a reader sees a whole file or none. The version's marker is
created first. A writer that is killed between the two leaves a marker without weights, which the
next `prune` removes, and never weights without a marker.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shared.atomic_files import draft_in, keep_draft, remove_abandoned_drafts
from shared.contracts.control import PolicyFile, PolicyPointer
from shared.policy_store.base import (
    PolicyDamagedError,
    PolicyStoreError,
    StoredPolicy,
    StorePlace,
    policy_label,
    wrong_hash,
    wrong_size,
)
from shared.policy_store.chain import ChainStore
from shared.policy_store.files import cause_of, copy_hashing, same_volume, sha256_of, sync_hashing

_MARK = re.compile(r"v(\d+)\.([0-9a-f]{64})\.version")


class VolumeStore:
    """See `PolicyStore`."""

    def __init__(self, folder: Path, node: str) -> None:
        self.folder = folder
        self._node = node

    async def publish(self, weights_file: Path, version: int) -> StoredPolicy:
        """Hash, sync and rename the file, or copy it if it is on another volume; see
        `PolicyStore.publish`.
        """
        return await asyncio.to_thread(self._publish, weights_file, version)

    def begin_again(self) -> None:
        """Nothing to do: every policy in this store is a full copy."""

    async def fetch(self, pointer: PolicyPointer | PolicyFile, into: Path) -> Path:
        """The file in place, after reading and hashing all of it; `into` is not used."""
        return await asyncio.to_thread(self._verified, pointer)

    async def prune(self, keep: Collection[int]) -> None:
        await asyncio.to_thread(self._prune, frozenset(keep))

    def _publish(self, weights_file: Path, version: int) -> StoredPolicy:
        """Creates the marker before the weights, both complete before they get their names (see the
        module's docstring). On the same volume the trainer's file is moved and not copied, because
        policies are gigabytes.
        """
        label = policy_label(self._node, version)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if same_volume(weights_file, self.folder):
                sha256, size_bytes = sync_hashing(weights_file)
                self._mark(version, sha256)
                os.replace(weights_file, self._weights(sha256))
            else:
                with draft_in(self.folder) as (stream, draft):
                    sha256, size_bytes = copy_hashing(weights_file, stream.write)
                    self._mark(version, sha256)
                    keep_draft(stream, draft, self._weights(sha256))
        except FileNotFoundError as error:
            raise PolicyStoreError(f"{label}: not published: {error}: was it deleted while being published?") from error
        except OSError as error:
            raise PolicyStoreError(f"{label}: not published: {cause_of(error, self.folder)}") from error
        return StoredPolicy(sha256, size_bytes, self._weights(sha256).absolute().as_uri())

    def _verified(self, pointer: PolicyPointer | PolicyFile) -> Path:
        """The size is compared before the hash, for which the whole file must be read. A missing
        file counts as damage and not as a failure of the store, because that makes the trainer
        publish it again.
        """
        label = policy_label(self._node, pointer.version)
        file = self._weights(pointer.sha256)
        try:
            size_bytes = file.stat().st_size
            if size_bytes != pointer.size_bytes:
                raise wrong_size(label, str(file), pointer.size_bytes, size_bytes)
            found = sha256_of(file)
        except FileNotFoundError:
            raise PolicyDamagedError(
                f"{label}: {file} does not exist (published as {pointer.uri}): it was pruned, and the trainer is asked to "
                "publish it "
                "again; or this process does not see the trainer's folder: set policy_store.uri to a folder that both see"
            ) from None
        except OSError as error:
            raise PolicyStoreError(f"{label}: {file} cannot be read: {error}: check the volume") from error
        if found != pointer.sha256:
            raise wrong_hash(label, str(file), pointer.sha256, found)
        return file

    def _prune(self, keep: frozenset[int]) -> None:
        """Two versions may have the same weights (a step without an update), so a file is deleted
        with its last marker. Weights are deleted before markers, so that an interrupted prune can
        be repeated.
        """
        try:
            marks = [
                (path, int(match[1]), match[2]) for path in self.folder.glob("v*.version") if (match := _MARK.fullmatch(path.name))
            ]
            needed = {sha256 for _, version, sha256 in marks if version in keep}
            for path, version, sha256 in marks:
                if version in keep:
                    continue
                if sha256 not in needed:
                    self._weights(sha256).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            remove_abandoned_drafts(self.folder)
        except OSError as error:
            raise PolicyStoreError(f"old policies of {self._node} not pruned: {cause_of(error, self.folder)}") from error

    def _mark(self, version: int, sha256: str) -> None:
        (self.folder / f"v{version}.{sha256}.version").touch()

    def _weights(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.safetensors"


def open_store(place: StorePlace) -> ChainStore:
    """The store that a `file://` uri names. Only full copies unless deltas are requested, because
    publishing a full copy is a rename.
    """
    parts = urlsplit(place.uri)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise PolicyStoreError(
            f"policy store {place.uri}: a file URI needs three slashes and an absolute path: set policy_store.uri to file:///folder"
        )
    return ChainStore(VolumeStore(Path(unquote(parts.path)), place.node), place.node, place.scratch, place.anchor_every or 1)

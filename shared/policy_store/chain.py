"""Stores occasional full copies of the policy (anchors) and the deltas from one policy to the next
in between, over any policy store.

A pointer names its anchor and all deltas since, so a reader needs nothing else. It starts with the
newest policy of the chain that it still has, or fetches the anchor; it applies the remaining
deltas, and uses the result only if its sha256 is the pointer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.contracts.control import PolicyDelta, PolicyFile, PolicyPointer
from shared.drafts import draft_in, remove_abandoned_drafts
from shared.policy_store.base import PolicyDamagedError, PolicyStore, PolicyStoreError, StoredPolicy, policy_label
from shared.policy_store.delta import Delta, DeltaError, write_delta
from shared.policy_store.files import cause_of, remove_old_downloads, sha256_of

_WORTH = 0.5
"""If a delta is larger than this part of a full copy, the full copy is published instead."""
_DELTAS = "deltas"


@dataclass(frozen=True, slots=True)
class _Link:
    """The end of the chain: the policy published last, and what a reader needs to build it."""

    file: Path
    sha256: str
    anchor: PolicyFile
    deltas: tuple[PolicyDelta, ...] = ()

    @property
    def version(self) -> int:
        return self.deltas[-1].file.version if self.deltas else self.anchor.version

    @property
    def versions(self) -> set[int]:
        return {self.anchor.version, *(delta.file.version for delta in self.deltas)}


class _WrongResult(PolicyDamagedError):
    """Undamaged deltas produced a different file than the pointer says."""


class ChainStore:
    """See `PolicyStore`. The writer keeps a copy of the policy it published last, a reader a copy
    of the one it fetched last.
    """

    def __init__(self, store: PolicyStore, node: str, scratch: Path | None = None, anchor_every: int = 1) -> None:
        """`scratch`: a folder of the writer's own; None for a reader. `anchor_every`: number of
        policies from one full copy to the next.
        """
        self._store = store
        self._node = node
        self._scratch = scratch
        self._anchor_every = anchor_every
        self._newest: _Link | None = None
        self._not_worth = 0
        """Number of policies to publish before a delta is tried again, after one that was nearly as
        large as a full copy.
        """
        self._anchors: dict[int, int] = {}
        """The version of the anchor that each version published by this process needs."""

    async def publish(self, weights_file: Path, version: int) -> StoredPolicy:
        """Publish a delta if this process published a policy before and the delta is small enough;
        otherwise a full copy, which is a new anchor.
        """
        stored = await self._publish_delta(weights_file, version)
        if stored is None:
            stored = await self._publish_anchor(weights_file, version)
        self._anchors[version] = stored.anchor.version if stored.anchor else version
        return stored

    def begin_again(self) -> None:
        """See `PolicyStore.begin_again`: the next policy is a full copy and starts a new chain."""
        self._newest, self._not_worth = None, 0

    async def fetch(self, pointer: PolicyPointer | PolicyFile, into: Path) -> Path:
        """See `PolicyStore.fetch`. A policy built from deltas is put into `into`, under the name
        that a download would have.
        """
        if isinstance(pointer, PolicyFile) or pointer.anchor is None:
            return await self._store.fetch(pointer, into)
        target = into / f"{pointer.sha256}.safetensors"
        label = policy_label(self._node, pointer.version)
        try:
            if target.exists() and await asyncio.to_thread(sha256_of, target) == pointer.sha256:
                return target
            into.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 (as short as any of its calls)
            for known in range(len(pointer.deltas) - 1, 0, -1):
                sha256 = pointer.deltas[known - 1].makes
                base = into / f"{sha256}.safetensors"
                if base.exists():
                    try:
                        return await self._make(label, pointer, base, sha256, pointer.deltas[known:], target)
                    except _WrongResult:
                        base.unlink(missing_ok=True)  # deltas are checked on arrival, so the base is damaged
                    break
            base = await self._store.fetch(pointer.anchor, into)
            return await self._make(label, pointer, base, pointer.anchor.sha256, pointer.deltas, target)
        except OSError as error:
            raise PolicyStoreError(f"{label}: not built: {cause_of(error, into)}") from error
        finally:
            await asyncio.to_thread(_tidy, into, target)

    async def prune(self, keep: Collection[int]) -> None:
        """Delete every version that no version in `keep` needs."""
        needed = set(keep)
        if self._newest is not None:
            # It may not have been announced yet, and the next policy needs it.
            needed |= self._newest.versions
        for version in keep:
            needed.update(range(self._anchors.get(version, version), version))
        await self._store.prune(needed)
        self._anchors = {version: anchor for version, anchor in self._anchors.items() if version in needed}

    async def _publish_anchor(self, weights_file: Path, version: int) -> StoredPolicy:
        link = None
        if self._scratch is not None and self._anchor_every > 1 and not self._not_worth:
            # Without the copy the next policy is also a full copy. That is no reason to fail the
            # publication of this one.
            with contextlib.suppress(OSError):
                link = await asyncio.to_thread(self._remember, weights_file)
        stored = await self._store.publish(weights_file, version)
        if link is not None:
            file = PolicyFile(version=version, sha256=stored.sha256, size_bytes=stored.size_bytes, uri=stored.uri)
            self._newest = _Link(link, stored.sha256, file, ())
        return stored

    async def _publish_delta(self, weights_file: Path, version: int) -> StoredPolicy | None:
        """None if a full copy is due or better."""
        newest, self._newest = self._newest, None
        self._not_worth = max(0, self._not_worth - 1)
        if newest is None or self._scratch is None or len(newest.deltas) + 1 >= self._anchor_every:
            return None
        if version <= newest.version:
            return None
        draft = self._scratch / "next.delta"
        try:
            info = await asyncio.to_thread(write_delta, newest.file, newest.sha256, weights_file, draft)
            if draft.stat().st_size > _WORTH * info.size_bytes:
                self._not_worth = self._anchor_every
                return None
            sent = await self._store.publish(draft, version)
            await asyncio.to_thread(self._remember, weights_file)
        except DeltaError:
            return None
        except OSError as error:
            label = policy_label(self._node, version)
            raise PolicyStoreError(f"{label}: not published: {cause_of(error, self._scratch)}") from error
        finally:
            draft.unlink(missing_ok=True)
        file = PolicyFile(version=version, sha256=sent.sha256, size_bytes=sent.size_bytes, uri=sent.uri)
        deltas = (*newest.deltas, PolicyDelta(file=file, makes=info.makes))
        self._newest = _Link(newest.file, info.makes, newest.anchor, deltas)
        return StoredPolicy(info.makes, info.size_bytes, newest.anchor.uri, newest.anchor, deltas)

    def _remember(self, weights_file: Path) -> Path:
        """Keep a copy of the policy for the next delta: a hard link if possible, because a volume
        store moves the file.
        """
        assert self._scratch is not None
        self._scratch.mkdir(parents=True, exist_ok=True)
        kept = self._scratch / "newest.safetensors"
        kept.unlink(missing_ok=True)
        try:
            os.link(weights_file, kept)
        except OSError:
            shutil.copyfile(weights_file, kept)
        return kept

    async def _make(
        self, label: str, pointer: PolicyPointer, base: Path, base_sha256: str, deltas: Sequence[PolicyDelta], target: Path
    ) -> Path:
        """Apply `deltas` to a copy of `base`. The result gets its final name only if its sha256 is
        the pointer's.
        """
        files = [await self._store.fetch(delta.file, target.parent / _DELTAS / str(delta.file.version)) for delta in deltas]
        try:
            await asyncio.to_thread(_apply, base, base_sha256, files, pointer.sha256, target)
        except DeltaError as error:
            raise _WrongResult(
                f"{label}: cannot be built from {base.name} and {len(deltas)} deltas: {error}: not loaded; a full copy "
                "is requested from the trainer"
            ) from None
        return target


def _tidy(folder: Path, newest: Path) -> None:
    """Keep the newest policy and the previous one, so that a loader that fails repeatedly does not
    fill the disk.
    """
    shutil.rmtree(folder / _DELTAS, ignore_errors=True)
    if newest.exists():
        remove_old_downloads(folder, newest)
    remove_abandoned_drafts(folder)


def _apply(base: Path, base_sha256: str, deltas: Sequence[Path], sha256: str, target: Path) -> None:
    with draft_in(target.parent) as (_, draft):
        shutil.copyfile(base, draft)
        contents = np.memmap(draft, np.uint8, "r+")
        for file in deltas:
            delta = Delta(file.read_bytes())
            if delta.info.base != base_sha256:
                raise DeltaError(f"{file.name} is for another base, {delta.info.base[:12]}.. instead of {base_sha256[:12]}..")
            delta.apply(contents)
            base_sha256 = delta.info.makes
        if (found := hashlib.sha256(contents.data).hexdigest()) != sha256:
            wrong = delta.damaged(contents)
            which = (
                f"{len(wrong)} tensors are wrong, {wrong[0]} for one"
                if wrong
                else "all tensors are right, the bytes around them are not"
            )
            raise DeltaError(f"sha256 mismatch (expected {sha256[:12]}.., got {found[:12]}..): {which}")
        os.replace(draft, target)  # not synced: after a power cut the hash check fails, and it is built again

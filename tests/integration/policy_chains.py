"""A trainer's policy store and its generators', on one volume or server, and what tests of policies
that travel as what changed do with them.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from shared.contracts.codec import decode, encode
from shared.contracts.control import PolicyPointer
from shared.contracts.streams import ensure_node_bucket
from shared.contracts.subjects import node_policies_stream
from shared.policy_store import PolicyStore, StoredPolicy, open_policy_store
from shared.transport.base import Lowering, Transport
from shared.transport.connect import connect

KINDS = ["file", "nats"]


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
    transport = None if kind == "file" else await connect(nats_url, name=node)
    if transport is not None:
        await ensure_node_bucket(transport, node, 1, Lowering.KEEP)
    try:
        yield Swarm(kind, folder, transport, node, anchor_every)
    finally:
        if transport is not None:
            await transport.close()


async def stored_bytes(alpha: Swarm) -> int:
    if alpha.transport is None:
        return sum(file.stat().st_size for file in (alpha.folder / "policies").iterdir())
    return (await alpha.transport.stream_state(node_policies_stream(alpha.node))).size_bytes

"""Batches made by hand, as the swarm's page reads them."""

from __future__ import annotations

from shared.contracts.messages import Batch, BatchItem
from shared.contracts.sampler_state import SamplerState
from tests.integration.page_swarm import group

NOW = 1_000_000.0


def batch(number: int, *items: BatchItem) -> Batch:
    return Batch(
        number=number, created_at=NOW + number, items=list(items), strategy="uniform", seed=1, wanted_local=1, wanted_external=1,
        pool_local=1, pool_external=1, shortage="none", state=SamplerState(),
    )  # fmt: skip


def item(taker: str, sender: str, *rewards: float, dataset: str = "gcd", replayed: bool = False, text: str = "6") -> BatchItem:
    scored = group(taker, sender, "How much is it?", [(text, reward) for reward in rewards], dataset=dataset, tokens=False)
    return BatchItem(scored=scored, staleness=0 if taker == sender else None, age_s=1.0, replayed=replayed)

"""Hostile messages through a whole running verifier: real server, real reads, border, real scorer
processes, real streams.

What the border's checks let pass goes to the sandbox and must end as a refusal or as a group on a
task that was truly derived.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import nats
import pytest
import structlog

from services.verifier.border import Refusal
from shared.contracts import subjects
from shared.contracts.messages import RolloutGroup
from shared.runtime.status import StatusBoard
from tests.chaos.figures import Row, note
from tests.chaos.scale import SCALE
from tests.fuzz.hostile import CANARY, hostile_messages, resident_bytes
from tests.integration.running_verifier import MakeServer, configured, generate, group, scored, until, verifier

GROWTH_BYTES = 96 * 2**20
CHUNK = min(5000, SCALE.intake_messages // 5)


def a_group(node: str, number: int) -> RolloutGroup:
    return group(node, number)


def settled(board: StatusBoard, sent: int) -> bool:
    """Return whether every message was refused or taken in."""
    return board.get("refused") + board.get("accepted") >= sent


async def _run(url: str, folder: Path) -> None:
    config = configured(
        "alpha", url, folder, intake_groups_per_s=1e6, intake_poll_s=0.02, max_foreign_bytes=65_536, answer_timeout_s=5.0
    )
    messages, sent = hostile_messages(2, a_group, max(100, SCALE.intake_messages // 1500)), 0
    warm_bytes, started = 0, time.monotonic()
    async with verifier(config) as alpha:
        publisher = await nats.connect(url)
        board = alpha.status
        while sent < SCALE.intake_messages:
            # A node passes over what stands under its own name, so that these could not be counted.
            foreign = (each for each in messages if subjects.rollouts_author(each.subject) != "alpha")
            for each in islice(foreign, CHUNK):
                await publisher.publish(each.subject, each.payload)
            await publisher.flush(30)
            sent += CHUNK
            await until(partial(settled, board, sent), 120.0)
            if not warm_bytes and sent >= SCALE.intake_messages // 5:
                gc.collect()
                warm_bytes = resident_bytes()
        seconds = time.monotonic() - started
        gc.collect()
        growth_bytes = resident_bytes() - warm_bytes
        refused = {reason.value: int(board.get(f"refused_{reason.value}")) for reason in Refusal}
        # The node itself is as well as before: local groups are scored at once.
        await generate(alpha.node, *(group("alpha", index) for index in range(5)))
        await until(lambda: board.get("scored_local") == 5)
        accepted = int(board.get("accepted"))
        taken = [each for each in await scored(alpha.node, "alpha") if each.origin == "external"]
        await publisher.close()
    note(
        Row(
            fault="hostile messages at the whole intake of a running verifier",
            injected=sent,
            counted="messages",
            sent=sent,
            lost=0,
            refused=refused,
            remark=f"{accepted} were good enough to be scored; memory grew by {growth_bytes / 2**20:.1f} MB after the first fifth; "
            f"{sent / seconds:.0f} a second",
        )
    )
    assert sum(refused.values()) + accepted == sent
    assert len([reason for reason, count in refused.items() if count]) >= 5
    assert all(0.0 <= reward <= 1.0 for each in taken for reward in each.rewards)
    assert max(Counter(each.group_id for each in taken).values(), default=1) == 1
    assert growth_bytes < GROWTH_BYTES


@pytest.fixture
def quiet() -> Iterator[None]:
    """One line for each refusal would be most of what is printed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("quiet")
def test_hostile_messages_through_a_running_verifier_are_all_accounted_for_and_run_no_code(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(os.listdir(tmp_path))
    asyncio.run(_run(nats_server(config="max_payload: 8MB").url, tmp_path))
    assert CANARY not in set(os.listdir(tmp_path)) - before

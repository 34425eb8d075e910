"""A whole verifier beside a member that shares right groups as large as they may be: its event loop
is not theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from services.verifier.sharing import sign
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.identity import keys
from shared.identity.keys import SigningKey, new_seed
from tests.integration.running_verifier import configured, generate, group, until, verifier
from tests.long_forms import FULL
from tests.nats_server import NatsServer

LARGE = b"\xff\xff\xff\x7f" * 2**20
COUNT = 6 if FULL else 4
"""Groups of the other member, half of them large; and as many local ones."""
PATIENCE_S = 120.0


async def test_the_signature_of_a_large_group_is_checked_outside_of_the_event_loop_and_local_groups_go_on(
    nats_server: Callable[..., NatsServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("alpha", nats_server(config="max_payload: 8MB\nmax_pending: 256MB").url, tmp_path)
    key, checked = SigningKey(new_seed()), []
    plain = keys.verify

    def watched(public_key: str, message: bytes, signature: bytes) -> bool:
        checked.append((len(message), threading.get_ident()))
        return plain(public_key, message, signature)

    monkeypatch.setattr(keys, "verify", watched)
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for index in range(COUNT):
            body = group("mallory", index) if index % 2 else msgspec.structs.replace(group("mallory", index), prompt_ids=LARGE)
            payload = encode(sign(body, key))
            subject, stream = subjects.rollouts("mallory"), subjects.SWARM_ROLLOUTS
            await alpha.swarm.publish(subject, payload, stream=stream, message_id=content_id(payload), timeout_s=20)
            await generate(alpha.node, group("alpha", index))
        await until(lambda: alpha.status.get("accepted") == alpha.status.get("scored_local") == COUNT, PATIENCE_S)
    large = {thread for size_bytes, thread in checked if size_bytes > len(LARGE)}
    assert len(large) == 1
    assert threading.get_ident() not in large

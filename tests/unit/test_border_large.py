"""Large foreign messages: what they cost the verifier's event loop and its memory, and what a
thread must not change.
"""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import services.verifier.border as border_module
from services.verifier.border import Border, Candidate, Refusal, Refused
from services.verifier.border_rules import BorderRules
from services.verifier.copies import CopyMemory, ReplayMemory
from services.verifier.fair_queue import SMALL_BYTES
from services.verifier.foreign_groups import Examiner
from services.verifier.sharing import Content, sign
from services.verifier.trust import KnownKeys
from shared.contracts.codec import encode, pack_ids, pack_logprobs
from shared.tasks.held_out import HeldOut
from tests.unit.test_border import KEY, NOW_S, OTHER_KEY, SUBJECT, completions, group, result, signed, with_body

MIB = 2**20
LARGE_PROMPT = pack_ids([2**31 - 1]) * MIB


def roomy(folder: Path) -> Border:
    rules = BorderRules(
        node="alpha",
        accept="same",
        own_tasks={("gcd", "{}")},
        max_age_s=1800,
        max_clock_skew_s=60,
        max_bytes=32 * MIB,
        max_completions=4,
        max_answer_chars=100,
        max_tokens=MIB,
    )
    return Border(rules, KnownKeys(folder / "known_keys.txt", ("alpha", OTHER_KEY.public_key)), ReplayMemory(1000), HeldOut([]))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": LARGE_PROMPT},
        {
            "completions": completions(
                token_count=MIB, token_ids=pack_ids([2**31 - 1]) * MIB, behaviour_logprobs=pack_logprobs([-1.5]) * MIB
            )[:1]
        },
    ],
    ids=["prompt", "answers"],
)
def test_token_arrays_are_looked_at_as_arrays(changes: dict[str, Any], tmp_path: Path) -> None:
    """A list of Python numbers takes ten times the memory of the array that it was made from, and
    the time of it.
    """
    gate, payload = roomy(tmp_path), signed(group(**changes))
    tracemalloc.start()
    try:
        verdict = gate.examine(SUBJECT, payload, NOW_S)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(verdict, Candidate), verdict
    # The body, the signed bytes and their copies at the signature check, the decoded arrays.
    assert peak_bytes < 6 * len(payload)


class Watch:
    """Where the work that grows with a payload is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: dict[str, set[int]] = {}
        for owner, name in (
            (border_module, "decode_foreign"),
            (border_module, "content_id"),
            (border_module.keys, "verify"),
            (border_module, "completion_problem"),
            (CopyMemory, "fingerprint_of"),
        ):
            monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            if name != "content_id" or len(arguments[0]) > SMALL_BYTES:
                self.threads.setdefault(name, set()).add(threading.get_ident())
            return plain(*arguments)

        return watched


async def examined(examiner: Examiner, payload: bytes, seq: int = 0) -> Candidate | Refused:
    return await asyncio.wait_for(examiner.examine(SUBJECT, payload, NOW_S, seq, 0.0), 120)


async def test_what_grows_with_a_large_payload_is_done_outside_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examiner = Examiner(roomy(tmp_path))
    large, small = signed(group(prompt_ids=LARGE_PROMPT)), signed(group(draw=1))
    watch = Watch(monkeypatch)
    assert isinstance(await examined(examiner, large), Candidate)
    assert set(watch.threads) == {"decode_foreign", "content_id", "verify", "completion_problem", "fingerprint_of"}
    assert threading.get_ident() not in set().union(*watch.threads.values())
    assert len(set().union(*watch.threads.values())) == 1, "one processor for all strangers together"
    watch.threads.clear()
    assert isinstance(await examined(examiner, small), Candidate)
    assert set().union(*watch.threads.values()) == {threading.get_ident()}
    examiner.close()


async def test_a_small_message_of_a_large_group_is_unpacked_outside_of_the_event_loop_and_a_bomb_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examiner = Examiner(roomy(tmp_path))
    large, bomb = (encode(sign(group(prompt_ids=bytes(size)), KEY, Content("all", "zstd"))) for size in (4 * MIB, 200 * MIB))
    assert max(len(large), len(bomb)) < 2**15
    watch = Watch(monkeypatch)
    assert isinstance(await examined(examiner, large), Candidate)
    assert threading.get_ident() not in watch.threads["fingerprint_of"]
    verdict = await examined(examiner, bomb)
    assert isinstance(verdict, Refused) and verdict.reason is Refusal.TOO_LARGE and verdict.blamed is None
    examiner.close()


async def test_verdicts_are_those_of_the_same_checks_in_one_go_and_the_same_body_counts_once(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    gate, plain = roomy(tmp_path), roomy(tmp_path / "plain")
    examiner = Examiner(gate)
    bad = with_body(bytes(2 * MIB))
    same = signed(group(prompt_ids=LARGE_PROMPT))
    payloads = [bad, bad, same, same, bytes(2 * MIB), bad, signed(group(draw=3, created_at=NOW_S - 9999, prompt_ids=LARGE_PROMPT))]
    verdicts = await asyncio.gather(*(examined(examiner, payload) for payload in payloads))
    reasons = [verdict.reason if isinstance(verdict, Refused) else None for verdict in verdicts]
    alone = [plain.examine(SUBJECT, payload, NOW_S) for payload in payloads]
    assert reasons == [verdict.reason if isinstance(verdict, Refused) else None for verdict in alone]
    assert [verdict.blamed for verdict in verdicts if isinstance(verdict, Refused)].count(KEY.public_key) == 1
    both = [verdict for verdict in verdicts if isinstance(verdict, Candidate)]
    outcomes = [gate.conclude(each, result(), NOW_S) for each in both]
    assert [None if outcome is None else outcome.reason for outcome in outcomes] == [None, Refusal.REPLAYED]
    examiner.close()

"""Messages: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import math
import subprocess
import sys

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.codec import content_id, decode, encode, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from shared.contracts.control import PolicyPointer
from shared.contracts.messages import Completion, ModelIdentity, RolloutGroup, Sampling, Task, TaskRef
from shared.contracts.wire import MessageError


def a_group(**changes: object) -> RolloutGroup:
    fields: dict[str, object] = {
        "node": "alpha",
        "created_at": 1_700_000_000.0,
        "draw": 3,
        "task": Task(ref=TaskRef(dataset="gcd", seed=1, index=2), question="gcd of 4 and 6?", answer="2"),
        "completions": [
            Completion(
                text="2",
                finish_reason="stop",
                token_count=2,
                token_ids=pack_ids([7, 1]),
                behaviour_logprobs=pack_logprobs([-0.5, -0.25]),
            ),
            Completion(text="3", finish_reason="length", token_count=1),
        ],
        "model": ModelIdentity(name="toy", tokenizer_hash="0" * 64),
        "policy_version": 5,
        "sampling": Sampling(),
    }
    return RolloutGroup(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_group_survives_the_wire() -> None:
    group = a_group()
    assert decode(encode(group), RolloutGroup) == group


def test_the_id_is_the_hash_of_the_bytes() -> None:
    assert content_id(encode(a_group())) == content_id(encode(a_group()))
    assert content_id(encode(a_group())) != content_id(encode(a_group(draw=4)))


def _with(changes: dict[str, object]) -> bytes:
    fields = msgpack.unpackb(encode(a_group()))
    fields.update(changes)
    packed: bytes = msgpack.packb(fields)
    return packed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 2}, "schema_version"),
        ({"extra": 1}, "malformed"),
        ({"created_at": math.nan}, "malformed"),
        ({"created_at": math.inf}, "malformed"),
        ({"node": "Not A Name"}, "malformed"),
        ({"completions": []}, "malformed"),
        ({"draw": -1}, "malformed"),
        ({"policy_version": "7"}, "malformed"),
    ],
)
def test_what_does_not_fit_is_refused_under_a_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(MessageError) as refused:
        decode(_with(changes), RolloutGroup)
    assert refused.value.reason == reason


def test_a_truncated_message_is_refused() -> None:
    payload = encode(a_group())
    for cut in range(0, len(payload), 7):
        with pytest.raises(MessageError):
            decode(payload[:cut], RolloutGroup)


def test_deep_nesting_is_refused_and_does_not_end_the_process() -> None:
    with pytest.raises(MessageError):
        decode(b"\x91" * 100_000, RolloutGroup)


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_never_crash(payload: bytes) -> None:
    with pytest.raises(MessageError):
        decode(payload, PolicyPointer)


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_token_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


@given(st.lists(st.floats(-50, 0, width=32), max_size=50))
def test_logprobs_survive_packing(logprobs: list[float]) -> None:
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs


@pytest.mark.parametrize("packed", [b"\x00", pack_logprobs([0.5]), pack_logprobs([math.nan])])
def test_torn_nan_or_positive_logprobs_are_refused(packed: bytes) -> None:
    with pytest.raises(MessageError):
        unpack_logprobs(packed)


def test_negative_token_ids_are_refused() -> None:
    with pytest.raises(MessageError):
        unpack_ids(pack_ids([-1]))


@pytest.mark.slow
def test_contracts_load_without_torch_or_transformers() -> None:
    script = (
        "import sys, shared.contracts.streams, shared.identity.permissions, shared.config, shared.transport.connect\n"
        "import shared.runtime\n"
        "heavy = {'torch', 'transformers', 'vllm', 'reasoning_gym'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
